"""A coordinator, its log, a network that delays and repeats, and producers of several incarnations.

The world runs a shard as the coordinator runtime does: records are replayed at once, replies given when they are
committed, and a crash loses any part of what was not. It knows more than anyone in it: which transaction each request
was meant for, and which incarnation owns an id. It checks every decision against that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import (
    AddPartitionsRequest,
    EndTxnReply,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    KeyValue,
    MarkersPosition,
    MarkersReply,
    NeedsProducerId,
    TopicPartition,
    TransactionConfig,
    TransactionMarkers,
    TransactionResult,
)
from penstock.transactions.transaction import (
    NO_PRODUCER,
    ProducerIdAndEpoch,
    TransactionMetadata,
    TransactionState,
)
from penstock.transactions.transaction_log import decode_key, decode_transaction, encode_transaction
from penstock.transactions.transaction_shard import TransactionCoordinatorShard

SETTINGS = TransactionConfig(
    two_phase_enabled=True,
    timed_out_check_interval_ms=10,
    id_expiration_ms=10**9,
    expired_check_interval_ms=10**8,
)
TIMEOUT_MS = 100


class Ghost(NamedTuple):
    """The truth about an id, hidden from all actors: its last owner, and whose transaction is open."""

    owner: int = 0
    transaction: int = 0


@dataclass(eq=False)
class Client:
    incarnation: int
    transactional_id: str
    version: int
    two_phase: bool
    producer: ProducerIdAndEpoch = NO_PRODUCER
    #: The transaction that it is in, by the world's count; 0 for none.
    transaction: int = 0
    #: It took over an open transaction and may only decide about it.
    is_kept: bool = False
    #: What it wants its transaction to become; it never changes its mind.
    verdict: bool | None = None
    #: The question that it waits for an answer to; earlier answers are ignored.
    asked: int = 0


class Sent(NamedTuple):
    client: Client
    question: int
    request: InitProducerIdRequest | AddPartitionsRequest | EndTxnRequest
    transaction: int


@dataclass
class Entry:
    record: KeyValue
    transaction: TransactionMetadata
    ghosts: dict[str, Ghost]
    stored: dict[str, TransactionMetadata]


@dataclass
class World:
    version: int
    log: list[Entry] = field(default_factory=list)
    committed: int = 0
    network: list[Sent] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    handed_out: list[TransactionMarkers] = field(default_factory=list)
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.ghosts: dict[str, Ghost] = {}
        self.position: MarkersPosition | None = None
        self._pending: list[tuple[int, Callable[[], None]]] = []
        self._questions = 0
        self._transactions = 0
        self._fresh_producer_id = 100
        self._given: set[tuple[str, ProducerIdAndEpoch]] = set()
        self._markers: dict[tuple[int, int], tuple[bool, tuple[TopicPartition, ...]]] = {}
        #: What producers were told of their transactions: it must be so for ever.
        self.promised: dict[int, bool] = {}
        self._load(0)

    # The coordinator

    def _load(self, upto: int) -> None:
        del self.log[upto:]
        self.shard = TransactionCoordinatorShard(SETTINGS, transaction_version=lambda: self.version)
        for entry in self.log:
            self.shard.replay(*entry.record)
        self.ghosts = dict(self.log[-1].ghosts) if self.log else {}
        assert self.shard.transactions == (self.log[-1].stored if self.log else {})
        assert self.shard.loaded(self.now_ms) == TransactionResult()
        self._pending.clear()
        self.committed = upto

    def crash(self, surviving: int) -> None:
        """What was committed survives; of the rest, as much as the next leader happens to have."""
        self._load(max(self.committed, min(surviving, len(self.log))))

    def commit(self) -> None:
        self.committed = len(self.log)
        pending, self._pending = self._pending, []
        for _, release in pending:
            release()

    def apply(
        self,
        work: TransactionResult,
        ghost: Callable[[TransactionMetadata | None, TransactionMetadata], Ghost],
    ) -> None:
        for record in work.records:
            transactional_id, before, after = self._change(record)
            self._check_epochs(before, after)
            self.ghosts[transactional_id] = ghost(before, after)
            self.shard.replay(*record)
            assert self.shard.transactions[transactional_id] == after
            self.log.append(Entry(record, after, dict(self.ghosts), dict(self.shard.transactions)))

    def later(self, release: Callable[[], None]) -> None:
        self._pending.append((len(self.log), release))

    def _change(self, record: KeyValue) -> tuple[str, TransactionMetadata | None, TransactionMetadata]:
        key, value = record
        transactional_id = decode_key(key)
        assert transactional_id is not None
        assert value is not None, "nothing expires here"
        before = self.shard.transactions.get(transactional_id)
        return transactional_id, before, decode_transaction(transactional_id, value)

    def _check_epochs(self, before: TransactionMetadata | None, after: TransactionMetadata) -> None:
        """Ids are made in rising order here, so neither they nor their epochs may ever fall."""
        if before is not None:
            assert after.client >= before.client
            assert after.producer >= before.producer
            if before.state.is_prepared:
                assert after.state.is_committed == before.state.is_committed
                assert after.state.is_complete

    # Producers

    def seed(self, transactional_id: str, epoch: int) -> None:
        """An id that has used many epochs."""
        self.now_ms += 1
        used = TransactionMetadata(
            transactional_id=transactional_id,
            state=TransactionState.EMPTY,
            producer=ProducerIdAndEpoch(self.fresh_producer_id(), epoch),
            timeout_ms=TIMEOUT_MS,
            update_timestamp_ms=self.now_ms,
        )
        self.apply(TransactionResult(records=(encode_transaction(used),)), lambda *_: Ghost())
        self.commit()

    def fresh_producer_id(self) -> int:
        self._fresh_producer_id += 1
        return self._fresh_producer_id

    def start(self, transactional_id: str, *, version: int, two_phase: bool, keep: bool) -> None:
        client = Client(len(self.clients) + 1, transactional_id, version, two_phase)
        self.clients.append(client)
        self.send_init(client, claims=False, keep=keep)

    def send_init(self, client: Client, *, claims: bool, keep: bool) -> None:
        claim = client.producer if claims else NO_PRODUCER
        request = InitProducerIdRequest(
            client.transactional_id, TIMEOUT_MS, *claim, enable_two_phase=client.two_phase, keep_prepared=keep
        )
        self._send(client, request)

    def send_add(self, client: Client, partition: int) -> None:
        if not client.transaction:
            client.transaction = self._new_transaction()
        places = (TopicPartition("t", partition),)
        request = AddPartitionsRequest(client.transactional_id, *client.producer, places, client.version)
        self._send(client, request)

    def send_end(self, client: Client, *, commit: bool) -> None:
        if not client.transaction:
            client.transaction = self._new_transaction()
        if client.verdict is None:
            client.verdict = commit
        request = EndTxnRequest(client.transactional_id, *client.producer, client.verdict, client.version)
        self._send(client, request)

    def _new_transaction(self) -> int:
        self._transactions += 1
        return self._transactions

    def _send(self, client: Client, request: Any) -> None:
        self._questions += 1
        client.asked = self._questions
        self.network.append(Sent(client, self._questions, request, client.transaction))

    def deliver(self, sent: Sent) -> None:
        """Once, twice, late: the network does not care."""
        before = self.shard.transactions.get(sent.client.transactional_id)
        ghost = self.ghosts.get(sent.client.transactional_id, Ghost())
        work = self._ask(sent, None)
        if any(isinstance(reply, NeedsProducerId) for _, reply in work.replies):
            assert not work.records
            work = self._ask(sent, self.fresh_producer_id())
        if work.records:
            self._check_change(sent, before, ghost)
        self.apply(work, lambda old, new: self._ghost(sent, ghost, old, new))
        for token, reply in work.replies:
            assert not isinstance(reply, NeedsProducerId)
            if token == "client":
                self.later(lambda reply=reply: self._receive(sent, reply, ghost))  # type: ignore[misc]
            else:
                self.later(lambda reply=reply: self.receive_markers(reply))  # type: ignore[misc]

    def _ask(self, sent: Sent, fresh_producer_id: int | None) -> TransactionResult:
        match sent.request:
            case InitProducerIdRequest() as request:
                return self.shard.init_producer_id(
                    request, "client", now_ms=self.now_ms, fresh_producer_id=fresh_producer_id
                )
            case AddPartitionsRequest() as request:
                return self.shard.add_partitions(request, "client", now_ms=self.now_ms)
            case EndTxnRequest() as request:
                return self.shard.end(
                    request, "client", now_ms=self.now_ms, fresh_producer_id=fresh_producer_id
                )

    def _check_change(self, sent: Sent, before: TransactionMetadata | None, ghost: Ghost) -> None:
        request = sent.request
        is_takeover = isinstance(request, InitProducerIdRequest) and request.producer_id < 0
        if not is_takeover:
            assert sent.client.incarnation >= ghost.owner, "a fenced producer changed something"
        assert before is not None or is_takeover or isinstance(request, InitProducerIdRequest)
        is_open = before is not None and before.state is TransactionState.ONGOING
        if is_open and sent.client.version >= 2 and isinstance(request, AddPartitionsRequest | EndTxnRequest):
            assert sent.transaction == ghost.transaction, "a late request touched a later transaction"

    def _ghost(
        self, sent: Sent, ghost: Ghost, before: TransactionMetadata | None, after: TransactionMetadata
    ) -> Ghost:
        request = sent.request
        if after.state.is_prepared:
            self._check_promise(ghost.transaction, after.state.is_committed)
            return ghost
        if isinstance(request, InitProducerIdRequest) and request.producer_id < 0:
            return ghost._replace(owner=sent.client.incarnation)
        if isinstance(request, AddPartitionsRequest) and (
            before is None or before.state is not TransactionState.ONGOING
        ):
            return ghost._replace(transaction=sent.transaction)
        return ghost

    def _check_promise(self, transaction: int, committed: bool) -> None:
        assert self.promised.get(transaction, committed) == committed, "decided twice"

    def _receive(self, sent: Sent, reply: object, ghost: Ghost) -> None:
        client = sent.client
        match reply:
            case InitProducerIdReply(error=ErrorCode.none):
                self._check_given(sent, ProducerIdAndEpoch(reply.producer_id, reply.epoch))
            case EndTxnReply(error=ErrorCode.none) if client.version >= 2:
                if isinstance(sent.request, EndTxnRequest) and sent.request.commit:
                    self._check_promise(sent.transaction, True)
                    self.promised[sent.transaction] = True
        if client.asked == sent.question:
            client.asked = 0
            self._go_on(client, reply, ghost)

    def _check_given(self, sent: Sent, producer: ProducerIdAndEpoch) -> None:
        assert isinstance(sent.request, InitProducerIdRequest)
        assert producer.epoch <= 32_766
        if sent.request.producer_id < 0:
            key = (sent.client.transactional_id, producer)
            assert key not in self._given, "two incarnations were given the same epoch"
            self._given.add(key)

    def _go_on(self, client: Client, reply: object, ghost: Ghost) -> None:
        match reply:
            case InitProducerIdReply(error=ErrorCode.none):
                client.producer = ProducerIdAndEpoch(reply.producer_id, reply.epoch)
                client.is_kept = reply.ongoing_producer_id >= 0
                client.transaction = ghost.transaction if client.is_kept else 0
                client.verdict = None
            case EndTxnReply(error=ErrorCode.none):
                assert reply.epoch <= 32_766
                client.producer = ProducerIdAndEpoch(reply.producer_id, reply.epoch)
                client.transaction, client.verdict, client.is_kept = 0, None, False

    # Markers

    def ask_markers(self) -> None:
        for _, reply in self.shard.next_markers(self.position, "writer").replies:
            self.later(lambda reply=reply: self.receive_markers(reply))  # type: ignore[misc]

    def receive_markers(self, reply: object) -> None:
        assert isinstance(reply, MarkersReply)
        self.position = reply.position
        for markers in reply.markers:
            self.handed_out.append(markers)
            if markers.transaction_version >= 2:
                told = self._markers.setdefault(
                    (markers.producer_id, markers.epoch), (markers.committed, markers.partitions)
                )
                assert told == (markers.committed, markers.partitions), "decided twice"

    def write_markers(self, markers: TransactionMarkers, partitions: tuple[TopicPartition, ...]) -> None:
        work = self.shard.markers_written(markers, partitions, "writer", now_ms=self.now_ms)
        self.apply(work, lambda old, new: self.ghosts[new.transactional_id])

    # Time

    def tick(self, by_ms: int) -> None:
        self.now_ms += by_ms
        deadline_ms = self.shard.next_deadline_ms()
        if deadline_ms is None or deadline_ms > self.now_ms:
            return
        work = self.shard.tick(self.now_ms)
        for record in work.records:
            _, before, after = self._change(record)
            assert before is not None
            assert before.state is TransactionState.ONGOING
            assert after.state is TransactionState.PREPARE_ABORT
            assert not before.is_two_phase, "time decided about a two-phase transaction"
            assert before.start_timestamp_ms + TIMEOUT_MS < self.now_ms
        self.apply(work, self._timed_out)
        for _, reply in work.replies:
            self.later(lambda reply=reply: self.receive_markers(reply))  # type: ignore[misc]

    def _timed_out(self, _: TransactionMetadata | None, after: TransactionMetadata) -> Ghost:
        ghost = self.ghosts[after.transactional_id]
        self._check_promise(ghost.transaction, False)
        return ghost

    # The end

    def settle(self) -> None:
        """Everyone has gone, and the coordinator moves once more: nothing may be left hanging."""
        self.crash(len(self.log))
        self.position = None
        for _ in range(4):
            self.tick(TIMEOUT_MS + SETTINGS.timed_out_check_interval_ms)
            self.commit()
            self.handed_out.clear()
            self.ask_markers()
            self.commit()
            for markers in tuple(self.handed_out):
                self.write_markers(markers, markers.partitions)
        for found in self.shard.transactions.values():
            is_open = found.state is TransactionState.ONGOING and found.is_two_phase
            assert is_open or found.state is TransactionState.EMPTY or found.state.is_complete, (
                f"{found} hangs"
            )
        self._check_promises()

    def _check_promises(self) -> None:
        outcomes: dict[int, list[bool]] = {}
        for entry in self.log:
            if entry.transaction.state.is_prepared:
                ghost = entry.ghosts[entry.transaction.transactional_id]
                outcomes.setdefault(ghost.transaction, []).append(entry.transaction.state.is_committed)
        if all(client.version >= 2 for client in self.clients):
            assert all(len(each) == 1 for each in outcomes.values()), "decided twice"
        for transaction, committed in self.promised.items():
            assert outcomes.get(transaction) == [committed], "a promise was broken"
