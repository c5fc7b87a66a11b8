"""Clients with transactions: writers, copiers that consume, transform and produce, and readers of what is committed.

They repeat what was not answered, give up and begin anew, are replaced while they are asleep, and wake as zombies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply, TransactionProducer
from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import (
    AddPartitionsReply,
    AddPartitionsRequest,
    EndTxnReply,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    TopicPartition,
)
from simulation.admission import TxnCommit, offsets_place
from simulation.clients import Client, Sleeper
from simulation.ledger import Violation
from simulation.network import IN_ORDER
from simulation.replica import Key, Produce
from simulation.script import Ask, Steps, play
from simulation.transaction_history import CommittedView, Copy, TransactionHistory, Written

if TYPE_CHECKING:
    from simulation.cluster import Cluster

COPIES_GROUP: Final = "copies"
TIMEOUT_MS: Final = 400
_PRODUCER_IDS: Final = 10_000
_NO_PRODUCER: Final = TransactionProducer(-1, -1)
#: Nothing was done, or nobody knows: it is asked again.
_PASSING: Final = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.kafka_storage_error,
    }
)


class Fenced(Exception):
    """Somebody else has this transactional id now, or time has run out: a new incarnation may begin."""


class Failed(Exception):
    """This transaction cannot be committed any more; the next one can."""


class Transactor(Sleeper):
    """One incarnation of a transactional producer."""

    def __init__(
        self,
        cluster: Cluster,
        id: int,
        counts: Counter[str],
        history: TransactionHistory,
        *,
        name: str,
        version: int,
        is_two_phase: bool = False,
    ) -> None:
        super().__init__(cluster, id, counts)
        self.history = history
        self.name = name
        self.version = version
        self.is_two_phase = is_two_phase
        self.producer = _NO_PRODUCER
        self.transaction = 0
        #: Whether it has left its transaction to be decided on by whoever comes next.
        self.is_prepared = False
        #: What a predecessor left so.
        self.inherited = 0
        self.is_over = False
        self.was_fenced = False
        self._sequences: dict[Key, int] = {}
        self._places: dict[tuple[Key, str], None] = {}
        self._records = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.id} {self.producer} in {self.transaction}>"

    @property
    def is_busy(self) -> bool:
        return self.transaction > 0 and not self.is_over

    def begin(self, on_end: Callable[[], None]) -> None:
        def ended(_: Any) -> None:
            self.is_over = True
            on_end()

        play(self, self._live(), ended)

    def _live(self) -> Steps:
        try:
            yield from self._init()
            yield from self._decide_inherited()
            yield from self.work()
        except Fenced:
            self.was_fenced = True
            self.counts["producers fenced"] += 1

    def _decide_inherited(self) -> Steps:
        if not self.inherited:
            return
        self.transaction, self.inherited = self.inherited, 0
        try:
            yield from self.end(commit=True)
        except Fenced:
            story = f"{self} may not decide on it any more"
            raise Violation("a prepared transaction waits for its decision", story) from None

    @abstractmethod
    def work(self) -> Steps: ...

    # --- the coordinator ---

    def _init(self) -> Steps:
        request = InitProducerIdRequest(
            self.name, TIMEOUT_MS, enable_two_phase=self.is_two_phase, keep_prepared=self.inherited > 0
        )

        def init(shard: Any, token: Any, now_ms: int) -> Any:
            fresh = _PRODUCER_IDS + self.world.serial()
            return shard.init_producer_id(request, token, now_ms=now_ms, fresh_producer_id=fresh)

        # One that comes late is a new incarnation to everybody, and may abort what another has prepared.
        kind = f"group {IN_ORDER}" if self.is_two_phase else "group"
        reply = yield from self._coordinated(init, InitProducerIdReply, kind)
        self._adopt(reply)

    def _adopt(self, reply: Any) -> None:
        producer = TransactionProducer(reply.producer_id, reply.epoch)
        if producer != self.producer:
            self._sequences.clear()
        self.producer = producer

    def _coordinated(self, operation: Any, expected: type, kind: str = "group") -> Steps:
        """Asked until it is answered. Raises Fenced."""
        while True:
            keys = self.cluster.partitions(TRANSACTION_STATE)
            reply = yield Ask(keys[0], kind, (keys[0], operation))
            if isinstance(reply, expected):
                error = reply.error  # type: ignore[attr-defined]
                if error is ErrorCode.none:
                    return reply
                if error not in _PASSING:
                    self.world.note("refused", self, error)
                    raise Fenced
            yield self.world.between(self.backoff_ms // 2, 2 * self.backoff_ms)

    def _add(self, topic: str, key: Key) -> Steps:
        """With the older protocol the producer itself says where it will write."""
        if self.version >= 2 or (key, topic) in self._places:
            return
        place = offsets_place() if topic == CONSUMER_OFFSETS else TopicPartition(topic, key.partition)
        request = AddPartitionsRequest(self.name, *self.producer, (place,), self.version)
        yield from self._coordinated(
            lambda shard, token, now_ms: shard.add_partitions(request, token, now_ms=now_ms),
            AddPartitionsReply,
        )
        self._places[key, topic] = None

    # --- one transaction ---

    def open(self) -> None:
        self.transaction = self.history.begins()
        self._places.clear()
        self._records = 0

    def produce(self, topic: str, key: Key, contents: list[Any]) -> Steps:
        """Raises Failed and Fenced."""
        yield from self._add(topic, key)
        values = tuple(Written(self.transaction, self._records + n, each) for n, each in enumerate(contents))
        self._records += len(values)
        sequence = self._sequences.get(key, 0)
        self._sequences[key] = sequence + len(values)
        request = Produce(key, values, True, *self.producer, sequence, self.name, self.version >= 2)
        while True:
            reply = yield Ask(key, "txn_produce", request)
            error = None if reply is None else reply[0]
            if error is ErrorCode.none:
                self.history.wrote(self.transaction, key, values)
                self.counts["records acknowledged"] += len(values)
                return
            self._check(error)
            yield self.world.between(self.backoff_ms // 2, 2 * self.backoff_ms)

    def commit_offset(self, source: Key, offset: int) -> Steps:
        """Raises Failed and Fenced."""
        key = self.cluster.partitions(CONSUMER_OFFSETS)[0]
        yield from self._add(CONSUMER_OFFSETS, key)
        position = OffsetToCommit(topic="input", partition=source.partition, offset=offset)
        commit = CommitRequest(group_id=COPIES_GROUP, offsets=(position,))
        request = TxnCommit(key, commit, self.name, self.producer, self.version >= 2)
        while True:
            reply = yield Ask(key, "txn_commit", request)
            if isinstance(reply, PartitionsReply) and reply.error is ErrorCode.none:
                return
            error = reply[0] if isinstance(reply, tuple) else getattr(reply, "error", reply)
            self._check(error)
            yield self.world.between(self.backoff_ms // 2, 2 * self.backoff_ms)

    def _check(self, error: ErrorCode | None) -> None:
        if error is None or error in _PASSING:
            self.counts["repeated"] += 1
            return
        self.world.note("refused", self, error)
        if error in (ErrorCode.transaction_abortable, ErrorCode.invalid_txn_state):
            raise Failed
        raise Fenced

    def end(self, *, commit: bool) -> Steps:
        """Raises Fenced, and then nobody knows."""
        transaction, self.transaction = self.transaction, 0
        self.history.decides(transaction, commit=commit)
        request = EndTxnRequest(self.name, *self.producer, commit, self.version)

        def end(shard: Any, token: Any, now_ms: int) -> Any:
            fresh = _PRODUCER_IDS + self.world.serial()
            return shard.end(request, token, now_ms=now_ms, fresh_producer_id=fresh)

        reply = yield from self._coordinated(end, EndTxnReply)
        self._adopt(reply)
        self.history.told(transaction, committed=commit)
        self.counts["transactions committed" if commit else "transactions aborted"] += 1


class Writer(Transactor):
    """Writes to several partitions at once."""

    is_closing = False

    def work(self) -> Steps:
        while not self.is_closing:
            self.open()
            try:
                keys = self.cluster.partitions("ledger")
                for _ in range(self.world.between(1, 3)):
                    key = keys[self.world.draw(len(keys))]
                    yield from self.produce("ledger", key, ["w"] * self.world.between(1, 2))
                    yield self.world.between(1, 20)
                if self.is_two_phase and self.world.chance(0.3):
                    # Prepared: from here on only whoever comes next decides, however long that takes.
                    self.history.decides(self.transaction, commit=True)
                    self.is_prepared = True
                    return
                yield from self.end(commit=self.world.chance(0.7))
            except Failed:
                yield from self.end(commit=False)
            yield self.world.between(1, 40)


class Copier(Transactor):
    """Copies one input partition, and commits how far it is with the copies."""

    def __init__(self, *args: Any, source: Key, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.source = source

    def work(self) -> Steps:
        position = yield from self._position()
        while True:
            inputs = yield from self._read(position)
            if not inputs:
                yield self.world.between(10, 60)
                continue
            self.open()
            try:
                yield from self._copy(inputs)
                yield from self.commit_offset(self.source, inputs[-1] + 1)
                yield self.world.between(0, 10)
                yield from self.end(commit=True)
                self.counts["records copied"] += len(inputs)
                position = inputs[-1] + 1
                if self.world.chance(0.3):
                    position = yield from self._position()  # as after a rebalance
            except Failed:
                yield from self.end(commit=False)
                position = yield from self._position()

    def _copy(self, inputs: list[int]) -> Steps:
        keys = self.cluster.partitions("copies")
        for offset in inputs:
            contents = [Copy(self.source, offset)]
            yield from self.produce("copies", keys[self.world.draw(len(keys))], contents)

    def _position(self) -> Steps:
        """The committed offset, once no transaction is about to change it."""
        place = ("input", self.source.partition)
        while True:
            key = self.cluster.partitions(CONSUMER_OFFSETS)[0]
            question = (key, lambda shard: shard.fetch(COPIES_GROUP, [place], require_stable=True))
            reply = yield Ask(key, "group_read", question)
            if isinstance(reply, tuple) and len(reply[1]) == 1 and not reply[1][0].is_unstable:
                committed = reply[1][0].committed
                return 0 if committed is None else committed.offset
            yield self.world.between(self.backoff_ms, 3 * self.backoff_ms)

    def _read(self, position: int) -> Steps:
        """Offsets of some input records."""
        reply = yield Ask(self.source, "consume", (self.source, position))
        if reply is None or reply[0] is not ErrorCode.none:
            return []
        offsets = [offset for batch in reply[1][1] for offset in range(batch.base_offset, batch.next_offset)]
        return [offset for offset in offsets if offset >= position][: self.world.between(1, 4)]


class CommittedReader(Client):
    """Reads all partitions of some topics as read_committed."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str], history: TransactionHistory) -> None:
        super().__init__(cluster, id, counts)
        self.history = history
        self.positions: dict[Key, int] = {}

    def begin(self, keys: list[Key]) -> None:
        for key in keys:
            self.positions[key] = 0
            play(self, self._follow(key))

    def _follow(self, key: Key) -> Steps:
        while True:
            position = self.positions[key]
            reply = yield Ask(key, "read_committed", (key, position))
            if reply is None or reply[0] is not ErrorCode.none or not reply[1][1]:
                yield self.world.between(20, 80)
                continue
            _, batches, aborted = reply[1]
            view = CommittedView(aborted)
            self.invariants.consumed(key, position, batches)
            for batch in batches:
                if view.shows(batch):
                    for value in batch.payload:
                        self.history.seen(key, value)
                        self.counts["committed records read"] += 1
            self.positions[key] = batches[-1].next_offset
            yield self.world.between(1, 10)

    def has_read(self, key: Key) -> bool:
        return self.positions[key] >= self.invariants.ledger(key).end_offset
