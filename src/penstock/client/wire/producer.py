"""A producer of raw record batches: always idempotent, transactional on request, with one-phase or two-phase commit.

Without a transactional id: `init`, `send`..., `flush`. With one: `init`, then for each transaction `send`...,
`commit_offsets`..., and `end`. With `prepare` in place of `end`, another process may end the transaction:
`end_prepared_transaction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.client.errors import ClientError, Fenced, Refused, UnsupportedVersion
from penstock.client.wire import transactions
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.in_flight import NO_PRODUCER, InFlightBatches, ProducerIdAndEpoch, SentBatch
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import CommittedOffset
from penstock.client.wire.topics import broker_settings
from penstock.client.wire.transactions import (
    EPOCH_PER_TRANSACTION,
    InitProducerIdResult,
    describe_transaction,
    end_transaction,
)
from penstock.protocol import produce
from penstock.protocol.errors import ErrorCode

_ABORT_STATES: Final = ("PrepareAbort", "CompleteAbort")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTransaction:
    """A transaction whose batches are all acknowledged. Any process can end it with this value."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: tuple[TopicPartition, ...]
    #: Groups whose offsets are committed with it.
    groups: tuple[str, ...] = ()
    transaction_version: int = EPOCH_PER_TRANSACTION

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written, so that there is nothing to end."""
        return not self.partitions and not self.groups


def end_prepared_transaction(cluster: Cluster, prepared: PreparedTransaction, *, commit: bool) -> None:
    """Commits or aborts the transaction. May be repeated.

    Raises Refused (INVALID_TXN_STATE) if it has ended the other way; Fenced if a commit comes too late, because the
    transaction timed out or its id was taken over; Unavailable if the call must be repeated.
    """
    if prepared.is_empty:
        return
    producer = ProducerIdAndEpoch(prepared.producer_id, prepared.epoch)
    try:
        end_transaction(
            cluster,
            prepared.transactional_id,
            producer,
            commit=commit,
            version=prepared.transaction_version,
        )
    except Fenced:
        if commit or not _was_aborted(cluster, prepared):
            raise


def _was_aborted(cluster: Cluster, prepared: PreparedTransaction) -> bool:
    """Whether the coordinator has aborted the transaction: it then uses the next epoch, to fence the producer."""
    info = describe_transaction(cluster, prepared.transactional_id)
    if info is None or info.state not in _ABORT_STATES:
        return False
    return info.producer == ProducerIdAndEpoch(prepared.producer_id, prepared.epoch + 1)


#: The last version of Produce before leaders began to add partitions to transactions.
_PRODUCE_VERSION_BEFORE_EPOCHS: Final = 11
_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"
#: The default of Apache Kafka and Penstock.
_TIMEOUT_MS_DEFAULT: Final = 900_000
#: Errors of brokers that do not support or allow two-phase commit.
_TWO_PHASE_REFUSALS: Final = frozenset(
    {
        ErrorCode.transactional_id_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.invalid_transaction_timeout,
        ErrorCode.invalid_request,
        ErrorCode.unsupported_version,
    }
)


class TwoPhaseKind(Enum):
    #: A prepared transaction stays open until it is ended (KIP-939).
    UNTIL_ENDED = "until-ended"
    #: A prepared transaction is aborted after the longest timeout that the broker allows.
    UNTIL_TIMEOUT = "until-timeout"


class RawProducer:
    """Raises Fenced if another producer has taken over the transactional id; this one cannot be used any more then."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = 60_000,
        two_phase: bool = False,
        transaction_version_max: int = EPOCH_PER_TRANSACTION,
    ) -> None:
        assert transactional_id or not two_phase, "two-phase commit needs a transactional id"
        self._cluster = cluster
        self.transactional_id = transactional_id
        self.transaction_timeout_ms = transaction_timeout_ms
        self.two_phase_kind: TwoPhaseKind | None = None
        self._two_phase = two_phase
        self._version_max = transaction_version_max
        self._version = 0
        self._producer = NO_PRODUCER
        self._in_flight = InFlightBatches(cluster, transactional_id=transactional_id)
        self._partitions: dict[TopicPartition, None] = {}
        self._groups: dict[str, None] = {}
        self._has_kept_transaction = False
        self._is_prepared = False

    def __repr__(self) -> str:
        return f"<RawProducer {self.transactional_id or ''} {self._producer}>"

    def __enter__(self) -> RawProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections. An open transaction stays open until another process ends it, or it times out."""
        self._in_flight.close()

    @property
    def producer(self) -> ProducerIdAndEpoch:
        return self._producer

    @property
    def transaction_version(self) -> int:
        """2 if every transaction has its own epoch, 0 for the older protocol."""
        return self._version

    @property
    def is_in_transaction(self) -> bool:
        return bool(self._partitions or self._groups or self._has_kept_transaction)

    # Initialising

    def init(self, *, keep_prepared: bool = False) -> InitProducerIdResult:
        """Gets a producer id. With a transactional id, fences its earlier producer. Call this first, and once.

        With `keep_prepared`, the open transaction of the earlier producer is not aborted, and `end` ends it. Raises
        Unavailable, Refused, Fenced, and UnsupportedVersion if the broker cannot keep transactions.
        """
        assert self._producer == NO_PRODUCER, f"{self} is initialised"
        if self.transactional_id is None:
            result = transactions.init_producer(self._cluster)
        else:
            result = self._init_transactional(self.transactional_id, keep_prepared=keep_prepared)
            self._version = self._cluster.call_coordinator(
                CoordinatorType.TRANSACTION,
                self.transactional_id,
                lambda connection: transactions.transaction_version(connection, self._version_max),
            )
        self._has_kept_transaction = result.ongoing is not None
        self._use_producer(result.producer)
        return result

    def _init_transactional(self, name: str, *, keep_prepared: bool) -> InitProducerIdResult:
        if not self._two_phase:
            return self._init_producer_id(name, keep_prepared=keep_prepared)
        self.two_phase_kind = TwoPhaseKind.UNTIL_ENDED
        try:
            return self._init_producer_id(name, keep_prepared=keep_prepared)
        except (UnsupportedVersion, Refused) as error:
            if isinstance(error, Refused) and error.code not in _TWO_PHASE_REFUSALS:
                raise
        self.two_phase_kind = TwoPhaseKind.UNTIL_TIMEOUT
        self.transaction_timeout_ms = self._longest_timeout_ms(name)
        return self._init_producer_id(name, keep_prepared=keep_prepared)

    def _init_producer_id(
        self, name: str, *, keep_prepared: bool = False, current: ProducerIdAndEpoch = NO_PRODUCER
    ) -> InitProducerIdResult:
        return transactions.init_transactional(
            self._cluster,
            name,
            timeout_ms=self.transaction_timeout_ms,
            current=current,
            two_phase=self.two_phase_kind is TwoPhaseKind.UNTIL_ENDED,
            keep_prepared=keep_prepared,
        )

    def _longest_timeout_ms(self, name: str) -> int:
        """Returns the coordinator's setting."""
        node_id = self._cluster.coordinator_id(CoordinatorType.TRANSACTION, name)
        try:
            found = broker_settings(self._cluster, node_id, [_TIMEOUT_SETTING]).get(_TIMEOUT_SETTING)
        except (Refused, UnsupportedVersion):
            found = None  # the user may not have the right to describe configs
        return int(found) if found else _TIMEOUT_MS_DEFAULT

    def _use_producer(self, producer: ProducerIdAndEpoch) -> None:
        self._producer = producer
        is_older = self.transactional_id is not None and self._version < EPOCH_PER_TRANSACTION
        self._in_flight.reset(
            producer, version_max=_PRODUCE_VERSION_BEFORE_EPOCHS if is_older else produce.PRODUCER_VERSION_MAX
        )

    # Sending

    def send(self, topic: str, partition: int, batch: bytearray) -> SentBatch:
        """Sends an encoded batch; waits while there is no room. Do not change the batch until `flush`.

        Also raises errors of earlier batches: Unavailable, Refused, Fenced, TopicChanged. After that, a transaction can
        only be aborted, and a producer without transactions cannot be used any more.
        """
        self._check_open()
        self._add_partition(topic, partition)
        return self._in_flight.submit(topic, partition, batch)

    def _add_partition(self, topic: str, partition: int) -> None:
        """Adds the partition to the transaction; in the newer protocol its leader does that."""
        if self.transactional_id is None or (topic, partition) in self._partitions:
            return
        if self._version < EPOCH_PER_TRANSACTION:
            transactions.add_partitions(
                self._cluster, self.transactional_id, self._producer, [(topic, partition)]
            )
        self._partitions[topic, partition] = None

    def flush(self) -> None:
        """Waits until all batches are acknowledged. Raises as `send` does."""
        self._in_flight.drain()

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int | CommittedOffset],
        *,
        generation: int = -1,
        member: str = "",
    ) -> None:
        """Adds a group's offsets to the transaction. Raises Fenced, Refused, Unavailable."""
        self._check_open()
        if not offsets:
            return
        if self._version < EPOCH_PER_TRANSACTION and group not in self._groups:
            transactions.add_offsets(self._cluster, self._name, self._producer, group)
        self._groups[group] = None
        transactions.commit_offsets(
            self._cluster,
            self._name,
            self._producer,
            group,
            offsets,
            version=self._version,
            generation=generation,
            member=member,
        )

    # Ending

    def prepare(self) -> PreparedTransaction:
        """Flushes; `end` or `end_prepared_transaction` then ends the transaction. Raises as `send` does."""
        self.flush()
        self._is_prepared = True
        return PreparedTransaction(
            transactional_id=self._name,
            producer_id=self._producer.id,
            epoch=self._producer.epoch,
            partitions=tuple(self._partitions),
            groups=tuple(self._groups),
            transaction_version=self._version,
        )

    def end(self, commit: bool) -> None:
        """Flushes and commits, or aborts. May be repeated if it raises Unavailable.

        Raises Fenced, Refused, Unavailable; a commit also raises as `send` does.
        """
        if commit:
            self.flush()
        is_clean = self._in_flight.settle()
        following = self._producer
        if self.is_in_transaction:
            following = transactions.end_transaction(
                self._cluster, self._name, self._producer, commit=commit, version=self._version
            )
        self._partitions, self._groups = {}, {}
        self._has_kept_transaction = self._is_prepared = False
        if following == self._producer and not is_clean:
            # The fate of some batches is unknown, so their sequence numbers cannot be used again.
            following = self._init_producer_id(self._name, current=self._producer).producer
        if following != self._producer:
            self._use_producer(following)

    @property
    def _name(self) -> str:
        if self.transactional_id is None:
            raise ClientError("a producer without a transactional id has no transactions")
        return self.transactional_id

    def _check_open(self) -> None:
        assert self._producer != NO_PRODUCER, f"{self} is not initialised"
        if self._is_prepared:
            raise ClientError(
                f"the transaction of {self.transactional_id} is prepared: no batch can be added to it"
            )
        if self._has_kept_transaction:
            raise ClientError(f"the prepared transaction of {self.transactional_id} must be ended first")
