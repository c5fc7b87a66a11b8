"""What producers and brokers ask of the transaction coordinator and what they are told, free of any wire version.

Errors are as the newest version has them: where a producer is fenced they say PRODUCER_FENCED, and whoever speaks an
older version turns that into INVALID_PRODUCER_EPOCH.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.protocol.errors import ErrorCode

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
#: From this version of the protocol on, every transaction has an epoch of its own (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class NeedsProducerId(NamedTuple):
    """Nothing was done: ask again with a `fresh_producer_id`, for this takes one."""


class InitRequest(NamedTuple):
    transactional_id: str
    timeout_ms: int
    #: What the producer had before, if it goes on after an error (KIP-360).
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    #: Somebody outside decides about prepared transactions: they never time out (KIP-939).
    enable_two_phase: bool = False
    #: Leave an open transaction to be decided by the new incarnation, instead of aborting it (KIP-939).
    keep_prepared: bool = False


class InitReply(NamedTuple):
    error: ErrorCode = ErrorCode.none
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    #: The open transaction that was kept, if there was one.
    ongoing_producer_id: int = NO_PRODUCER_ID
    ongoing_epoch: int = NO_PRODUCER_EPOCH


class AddRequest(NamedTuple):
    """Partitions to add, or to verify. Offsets of a group are its partition of `__consumer_offsets`."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: tuple[TopicPartition, ...]
    #: 0 or 1 when the producer itself asks, 2 when a broker adds for a producer of the newer protocol.
    transaction_version: int = 0


class AddReply(NamedTuple):
    """An error of the whole is repeated for each partition."""

    error: ErrorCode = ErrorCode.none
    partitions: tuple[tuple[TopicPartition, ErrorCode], ...] = ()


class EndRequest(NamedTuple):
    transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    transaction_version: int = 0


class EndReply(NamedTuple):
    """What the next transaction is begun with; the same as before with the older protocol."""

    error: ErrorCode = ErrorCode.none
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


class Markers(NamedTuple):
    """The end of one transaction, to be written into each of its partitions."""

    #: Of this hand-out in the life of the shard: all else may be the same for a producer's next transaction.
    serial: int
    transactional_id: str
    producer_id: int
    epoch: int
    committed: bool
    partitions: tuple[TopicPartition, ...]
    transaction_version: int


class MarkersPosition(NamedTuple):
    """How far markers were received from one life of a shard; for a later life it means nothing."""

    life: object
    serial: int


class MarkersReply(NamedTuple):
    """Hand `position` back with the next question: what is not confirmed so is handed out again."""

    markers: tuple[Markers, ...]
    position: MarkersPosition


class DescribedTransaction(NamedTuple):
    transactional_id: str
    error: ErrorCode = ErrorCode.none
    state: str = ""
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    timeout_ms: int = 0
    #: -1 when no transaction was begun.
    start_timestamp_ms: int = -1
    partitions: tuple[TopicPartition, ...] = ()


class ListFilters(NamedTuple):
    """No states, no producer ids, a duration below 0 and no matcher let everything pass."""

    states: frozenset[str] = frozenset()
    producer_ids: frozenset[int] = frozenset()
    #: Only transactions that have been open for longer than this.
    duration_ms: int = -1
    matches_id: Callable[[str], bool] | None = None


class ListedTransaction(NamedTuple):
    transactional_id: str
    producer_id: int
    state: str


class ListReply(NamedTuple):
    transactions: tuple[ListedTransaction, ...]
    unknown_states: tuple[str, ...] = ()
