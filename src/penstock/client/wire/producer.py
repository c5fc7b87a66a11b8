"""A producer of raw record batches: idempotent always, transactional on request, in one phase or in two.

Without a transactional id: `init`, `send`..., `flush`. With one: `init`, then for each transaction `send`...,
`commit_offsets`..., and `end`; or `prepare` instead of `end`, when somebody else is to end it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from penstock.client import transactions
from penstock.client.cluster import Cluster, Coordinates
from penstock.client.errors import ClientError, Refused, UnsupportedVersion
from penstock.client.metadata import Place
from penstock.client.pipeline import Pipeline
from penstock.client.positions import CommittedOffset
from penstock.client.prepared import Prepared
from penstock.client.sequencing import NO_PRODUCER, Delivery, Producer
from penstock.client.topics import broker_settings
from penstock.client.transactions import EPOCH_PER_TRANSACTION, Begun
from penstock.protocol import client_produce
from penstock.protocol.errors import ErrorCode

#: The last version of Produce before leaders began to add partitions to transactions.
_PRODUCE_OLDER: Final = 11
_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"
#: What Apache Kafka and Penstock allow unless told otherwise.
_TIMEOUT_MS_DEFAULT: Final = 900_000
#: How brokers refuse two phases, which have to be switched on or allowed.
_NOT_ALLOWED: Final = frozenset(
    {
        ErrorCode.transactional_id_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.invalid_transaction_timeout,
        ErrorCode.invalid_request,
        ErrorCode.unsupported_version,
    }
)


class TwoPhaseKind(Enum):
    #: A prepared transaction stays open until somebody ends it (KIP-939).
    UNTIL_ENDED = "until-ended"
    #: It is aborted when it has been open for the longest time that the broker allows.
    UNTIL_TIMEOUT = "until-timeout"


class RawProducer:
    """Raises Fenced when somebody else has taken the transactional id over; then it is of no more use."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = 60_000,
        two_phase: bool = False,
        transaction_version_max: int = EPOCH_PER_TRANSACTION,
    ) -> None:
        assert transactional_id or not two_phase, "only transactions have phases"
        self._cluster = cluster
        self.transactional_id = transactional_id
        self.transaction_timeout_ms = transaction_timeout_ms
        self.two_phase_kind: TwoPhaseKind | None = None
        self._two_phase = two_phase
        self._version_max = transaction_version_max
        self._version = 0
        self._producer = NO_PRODUCER
        self._pipeline = Pipeline(cluster, transactional_id=transactional_id)
        self._partitions: dict[Place, None] = {}
        self._groups: dict[str, None] = {}
        self._is_kept = False
        self._is_prepared = False

    def __repr__(self) -> str:
        return f"<RawProducer {self.transactional_id or ''} {self._producer}>"

    def __enter__(self) -> RawProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up connections. An open transaction stays open until somebody ends it, or its time is up."""
        self._pipeline.close()

    @property
    def producer(self) -> Producer:
        return self._producer

    @property
    def transaction_version(self) -> int:
        """2: every transaction has an epoch of its own. 0: the older protocol."""
        return self._version

    @property
    def is_in_transaction(self) -> bool:
        return bool(self._partitions or self._groups or self._is_kept)

    # Beginning

    def init(self, *, keep_prepared: bool = False) -> Begun:
        """Get an id, and with a transactional id fence whoever had that. To be called first, and once.

        With `keep_prepared` the open transaction of a predecessor is not aborted: `end` decides about it.
        Raises Unavailable, Refused, Fenced; UnsupportedVersion when nothing can be kept.
        """
        assert self._producer == NO_PRODUCER, f"{self} has begun"
        if self.transactional_id is None:
            begun = transactions.init_producer(self._cluster)
        else:
            begun = self._init_transactional(self.transactional_id, keep_prepared=keep_prepared)
            self._version = self._cluster.call_coordinator(
                Coordinates.TRANSACTION,
                self.transactional_id,
                lambda connection: transactions.transaction_version(connection, self._version_max),
            )
        self._is_kept = begun.ongoing is not None
        self._become(begun.producer)
        return begun

    def _init_transactional(self, name: str, *, keep_prepared: bool) -> Begun:
        if not self._two_phase:
            return self._ask_init(name, keep_prepared=keep_prepared)
        self.two_phase_kind = TwoPhaseKind.UNTIL_ENDED
        try:
            return self._ask_init(name, keep_prepared=keep_prepared)
        except (UnsupportedVersion, Refused) as error:
            if isinstance(error, Refused) and error.code not in _NOT_ALLOWED:
                raise
        self.two_phase_kind = TwoPhaseKind.UNTIL_TIMEOUT
        self.transaction_timeout_ms = self._longest_timeout_ms(name)
        return self._ask_init(name, keep_prepared=keep_prepared)

    def _ask_init(self, name: str, *, keep_prepared: bool = False, current: Producer = NO_PRODUCER) -> Begun:
        return transactions.init_transactional(
            self._cluster,
            name,
            timeout_ms=self.transaction_timeout_ms,
            current=current,
            two_phase=self.two_phase_kind is TwoPhaseKind.UNTIL_ENDED,
            keep_prepared=keep_prepared,
        )

    def _longest_timeout_ms(self, name: str) -> int:
        """As the coordinator, who judges, is set."""
        node_id = self._cluster.coordinator_id(Coordinates.TRANSACTION, name)
        try:
            found = broker_settings(self._cluster, node_id, [_TIMEOUT_SETTING]).get(_TIMEOUT_SETTING)
        except (Refused, UnsupportedVersion):
            found = None  # not everyone may look at the settings of brokers
        return int(found) if found else _TIMEOUT_MS_DEFAULT

    def _become(self, producer: Producer) -> None:
        self._producer = producer
        is_older = self.transactional_id is not None and self._version < EPOCH_PER_TRANSACTION
        self._pipeline.reset(producer, version_max=_PRODUCE_OLDER if is_older else client_produce.NEWEST)

    # Writing

    def send(self, topic: str, partition: int, batch: bytearray) -> Delivery:
        """Stamp the encoded batch and send it, waiting for room if need be; it must not be touched until `flush`.

        Raises what an earlier batch failed with, too: Unavailable, Refused, Fenced, TopicChanged. After that a
        transaction can only be aborted, and a producer without one is of no more use.
        """
        self._check_open()
        self._join(topic, partition)
        return self._pipeline.submit(topic, partition, batch)

    def _join(self, topic: str, partition: int) -> None:
        """Let the transaction know of the partition; with the newer protocol its leader does that."""
        if self.transactional_id is None or (topic, partition) in self._partitions:
            return
        if self._version < EPOCH_PER_TRANSACTION:
            transactions.add_partitions(
                self._cluster, self.transactional_id, self._producer, [(topic, partition)]
            )
        self._partitions[topic, partition] = None

    def flush(self) -> None:
        """Wait until everything that was sent is acknowledged. Raises as `send` does."""
        self._pipeline.drain()

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[Place, int | CommittedOffset],
        *,
        generation: int = -1,
        member: str = "",
    ) -> None:
        """Make a group's positions part of the transaction. Raises Fenced, Refused, Unavailable."""
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

    def prepare(self) -> Prepared:
        """Flush, and leave it to `end` or `end_prepared` how this ends. Raises as `send` does."""
        self.flush()
        self._is_prepared = True
        return Prepared(
            transactional_id=self._name,
            producer_id=self._producer.id,
            epoch=self._producer.epoch,
            partitions=tuple(self._partitions),
            groups=tuple(self._groups),
            transaction_version=self._version,
        )

    def end(self, commit: bool) -> None:
        """Commit, after a flush, or abort. When it raises Unavailable the same may be asked again.

        Raises Fenced, Refused, Unavailable; a commit also what `send` raises.
        """
        if commit:
            self.flush()
        is_clean = self._pipeline.settle()
        following = self._producer
        if self.is_in_transaction:
            following = transactions.end_transaction(
                self._cluster, self._name, self._producer, commit=commit, version=self._version
            )
        self._partitions, self._groups = {}, {}
        self._is_kept = self._is_prepared = False
        if following == self._producer and not is_clean:
            # What became of some batches is not known, so their numbers cannot be used again.
            following = self._ask_init(self._name, current=self._producer).producer
        if following != self._producer:
            self._become(following)

    @property
    def _name(self) -> str:
        if self.transactional_id is None:
            raise ClientError("a producer without a transactional id has no transactions")
        return self.transactional_id

    def _check_open(self) -> None:
        assert self._producer != NO_PRODUCER, f"{self} has not begun"
        if self._is_prepared:
            raise ClientError(
                f"the transaction of {self.transactional_id} is prepared: nothing can be added to it"
            )
        if self._is_kept:
            raise ClientError(f"the transaction that {self.transactional_id} found has to be ended first")
