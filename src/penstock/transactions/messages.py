"""Requests to the transaction coordinator and its replies, independent of the wire version.

Errors are those of the newest version: a fenced producer gets PRODUCER_FENCED, and the code that serves an older
version turns that into INVALID_PRODUCER_EPOCH. `TransactionConfig` holds the settings of the node, with Kafka's
names in the comments; `TransactionResult` is what an operation returns.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import KeyValue

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
#: From this protocol version on, every transaction has its own epoch (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class NeedsProducerId(NamedTuple):
    """Nothing was done: the operation needs a producer id. Repeat it with a `fresh_producer_id`."""


class InitProducerIdRequest(NamedTuple):
    transactional_id: str
    timeout_ms: int
    #: The previous id and epoch of a producer that continues after an error (KIP-360).
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    #: An external coordinator decides about prepared transactions, so they never time out (KIP-939).
    enable_two_phase: bool = False
    #: Keep an open transaction for the new incarnation to commit or abort, instead of aborting it (KIP-939).
    keep_prepared: bool = False


class InitProducerIdReply(NamedTuple):
    error: ErrorCode = ErrorCode.none
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    #: The open transaction that was kept, if there was one.
    ongoing_producer_id: int = NO_PRODUCER_ID
    ongoing_epoch: int = NO_PRODUCER_EPOCH


class AddPartitionsRequest(NamedTuple):
    """Partitions to add, or to verify. Offsets of a group are its partition of `__consumer_offsets`."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: tuple[TopicPartition, ...]
    #: 0 or 1 if the producer sends the request, 2 if a broker adds partitions for a producer of the newer protocol.
    transaction_version: int = 0


class AddPartitionsReply(NamedTuple):
    """An error of the whole request is repeated for each partition."""

    error: ErrorCode = ErrorCode.none
    partitions: tuple[tuple[TopicPartition, ErrorCode], ...] = ()


class EndTxnRequest(NamedTuple):
    transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    transaction_version: int = 0


class EndTxnReply(NamedTuple):
    """The id and epoch for the next transaction; with the older protocol they do not change."""

    error: ErrorCode = ErrorCode.none
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


class TransactionMarkers(NamedTuple):
    """The end of one transaction, to be written to each of its partitions."""

    #: Unique within a loaded shard. All other fields may be the same for the producer's next transaction.
    serial: int
    transactional_id: str
    producer_id: int
    epoch: int
    committed: bool
    partitions: tuple[TopicPartition, ...]
    transaction_version: int


class MarkersPosition(NamedTuple):
    """How far markers were received from a loaded shard. It is meaningless after the shard is loaded again."""

    life: object
    serial: int


class MarkersReply(NamedTuple):
    """Send `position` with the next request. Markers that are not confirmed this way are returned again."""

    markers: tuple[TransactionMarkers, ...]
    position: MarkersPosition


class DescribedTransaction(NamedTuple):
    transactional_id: str
    error: ErrorCode = ErrorCode.none
    state: str = ""
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH
    timeout_ms: int = 0
    #: -1 if no transaction was started.
    start_timestamp_ms: int = -1
    partitions: tuple[TopicPartition, ...] = ()


class ListTransactionsFilters(NamedTuple):
    """Without states, producer ids, a duration of at least 0 or a matcher, all transactions match."""

    states: frozenset[str] = frozenset()
    producer_ids: frozenset[int] = frozenset()
    #: Only transactions that have been open for longer than this.
    duration_ms: int = -1
    matches_id: Callable[[str], bool] | None = None


class ListedTransaction(NamedTuple):
    transactional_id: str
    producer_id: int
    state: str


class ListTransactionsReply(NamedTuple):
    transactions: tuple[ListedTransaction, ...]
    unknown_states: tuple[str, ...] = ()


_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig:
    timeout_max_ms: int = 900_000  # transaction.max.timeout.ms
    id_expiration_ms: int = 7 * _DAY_MS  # transactional.id.expiration.ms
    timed_out_check_interval_ms: int = 10_000  # transaction.abort.timed.out.transaction.cleanup.interval.ms
    expired_check_interval_ms: int = 3_600_000  # transaction.remove.expired.transaction.cleanup.interval.ms
    two_phase_enabled: bool = True  # transaction.two.phase.commit.enable


#: Identifies the request that a reply belongs to. The shard keeps the token of a request that waits.
ReplyToken = Hashable


class TransactionResult(NamedTuple):
    """Append the records as one batch, replay them, and send the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[ReplyToken, object], ...] = ()
    producer: None = None  # the records of this coordinator are never part of a transaction
