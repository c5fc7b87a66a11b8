"""The transactional producers of the world of transactions: writers to several partitions, and copiers.

Producers of both protocol versions repeat what was not answered, take too long, are replaced while they are suspended,
and come back as zombies. One writer prepares transactions that its successor ends (two-phase commit).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import (
    TRANSACTIONAL,
    Record,
    encode_batch,
)
from simulation.checks.transactions import (
    Place,
    Producer,
    Written,
)
from simulation.client import FIND_COORDINATOR, INIT_PRODUCER_ID, Client, fetched_records, message

if TYPE_CHECKING:
    from simulation.worlds.transactions import TransactionWorld

OFFSET_FETCH: Final = 9
ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
TXN_OFFSET_COMMIT: Final = 28

_GROUP, _TRANSACTION = 0, 1  # kinds of coordinators

COPIES_GROUP: Final = "copies"
TRANSACTION_TIMEOUT_S: Final = 0.6
_PACE_S: Final = (0.005, 0.1)
_WINDOW_MAX: Final = 2
_LATE_CHANCE: Final = 0.06
_LATE_S: Final = (0.01, 0.4)
_REPEATABLE: Final = frozenset({0, INIT_PRODUCER_ID, END_TXN, TXN_OFFSET_COMMIT})
#: Another node coordinates now, or will soon.
_MOVED: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)
#: Nothing was done, or the outcome is unknown: the request is sent again.
_PASSING: Final = _MOVED | {
    ErrorCode.concurrent_transactions,
    ErrorCode.not_leader_or_follower,
    ErrorCode.leader_not_available,
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.not_enough_replicas,
    ErrorCode.not_enough_replicas_after_append,
    ErrorCode.request_timed_out,
    ErrorCode.kafka_storage_error,
    ErrorCode.network_exception,
}
_FAILED: Final = frozenset({ErrorCode.transaction_abortable, ErrorCode.invalid_txn_state})


class Fenced(Exception):
    """Another producer has this transactional id, or the time is over: a new incarnation may begin."""


class Failed(Exception):
    """This transaction cannot be committed any more; the next one can."""


class Batch(NamedTuple):
    sequence: int
    records: list[Written]

    def encode(self, producer: Producer) -> bytearray:
        return encode_batch(
            [Record(number, 1, None, record.encode()) for number, record in enumerate(self.records)],
            attributes=TRANSACTIONAL,
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=self.sequence,
        )


class CoordinatedClient(Client):
    """Finds its coordinators, and keeps to them until they moved."""

    def __init__(self, world: TransactionWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self._coordinators: dict[tuple[int, str], int] = {}

    async def _coordinator(self, kind: int, key: str) -> int:
        while (kind, key) not in self._coordinators:
            request = message(FIND_COORDINATOR, 4)(
                "FindCoordinatorRequest", key_type=kind, coordinator_keys=(key,)
            )
            reply = await self.call(self.any_node(), FIND_COORDINATOR, 4, request)
            if reply is not None and reply.coordinators[0].error_code == ErrorCode.none:
                self._coordinators[kind, key] = int(reply.coordinators[0].node_id)
            else:
                await self.back_off()
        return self._coordinators[kind, key]

    def _moved(self, kind: int, key: str) -> None:
        self._coordinators.pop((kind, key), None)


class Transactor(CoordinatedClient):
    """One incarnation of a transactional producer. `is_newer`: it has an epoch per transaction (KIP-890)."""

    def __init__(
        self, world: TransactionWorld, number: int, *, name: str, is_newer: bool, is_two_phase: bool = False
    ) -> None:
        super().__init__(world, number)
        self.history = world.history
        self.name = name
        self.is_newer = is_newer
        self.is_two_phase = is_two_phase
        self.producer = Producer()
        self.transaction = 0
        #: Whether it has left its transaction to its successor; and how that is to end it.
        self.is_prepared = False
        self.commits_prepared = True
        self.predecessor: Transactor | None = None
        self.is_over = False
        self.was_fenced = False
        #: Whether it has left a transaction open that only the coordinator will end.
        self.has_abandoned = False
        self._init_attempts = 0
        self._sequences: dict[Place, int] = {}
        self._added: dict[Place, None] = {}
        self._records = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.number} {self.producer} in {self.transaction}>"

    async def live(self) -> None:
        try:
            inherited = (
                self.predecessor if self.predecessor is not None and self.predecessor.is_prepared else None
            )
            await self._init(inherited)
            if inherited is not None:
                await self._end_inherited(inherited)
            await self.work()
        except Fenced:
            self.was_fenced = True
            self.counts["producers fenced"] += 1
        self.is_over = True
        self.world.ended(self)

    @abstractmethod
    async def work(self) -> None: ...

    async def call(self, node_id: int, api_key: int, version: int, request: Any, **fields: Any) -> Any:
        """Now and then the network delivers a request once more, after its client has gone on.

        With the older protocol, such a request looks like a current one. And a late InitProducerId
        is a new incarnation, which may abort what another has prepared.
        """
        is_safe = self.is_newer and not (self.is_two_phase and api_key == INIT_PRODUCER_ID)
        if (
            is_safe
            and api_key in _REPEATABLE
            and self.loop.chance(_LATE_CHANCE)
            and not self.world.is_closing
        ):
            self.spawn(self._send_late(node_id, api_key, version, request))
        return await super().call(node_id, api_key, version, request, **fields)

    async def _send_late(self, node_id: int, api_key: int, version: int, request: Any) -> None:
        await asyncio.sleep(self.loop.between(*_LATE_S))
        self.counts["late requests"] += 1
        await super().call(node_id, api_key, version, request, purpose="late")

    # -- the transaction coordinator -------------------------------------------------------------------

    async def _coordinated(
        self, api_key: int, version: int, request: Any, error_of: Callable[[Any], ErrorCode]
    ) -> Any:
        """Send a request until it is answered. Raises Failed and Fenced."""
        while True:
            node_id = await self._coordinator(_TRANSACTION, self.name)
            was_zombie = self.history.is_zombie(self.name, self.producer)
            reply = await self.call(node_id, api_key, version, request)
            error = None if reply is None else ErrorCode(error_of(reply))
            if error is ErrorCode.none:
                if api_key != INIT_PRODUCER_ID:
                    name = type(request).__name__
                    self.history.accepted(self.name, self.producer, name, was_zombie=was_zombie)
                return reply
            if error is None or error in _MOVED:
                self._moved(_TRANSACTION, self.name)
            self._check(error)
            await self.back_off()

    def _check(self, error: ErrorCode | None) -> None:
        """Raises Failed and Fenced."""
        if error is None or error in _PASSING:
            self.counts["requests repeated"] += 1
            return
        self.loop.note("refused", self, error)
        self.counts[f"refused: {error.name}"] += 1
        raise Failed if error in _FAILED else Fenced

    async def _init(self, inherited: Transactor | None = None, *, continues: bool = False) -> None:
        version = 6 if self.is_two_phase else 5 if self.is_newer else 4
        fields: dict[str, Any] = {}
        if self.is_two_phase:
            fields = {"enable2_pc": True, "keep_prepared_txn": inherited is not None}
        old = self.producer if continues else Producer()
        request = message(INIT_PRODUCER_ID, version)(
            "InitProducerIdRequest",
            transactional_id=self.name,
            transaction_timeout=timedelta(seconds=TRANSACTION_TIMEOUT_S),
            producer_id=old.id,
            producer_epoch=old.epoch,
            **fields,
        )
        before = self.counts["requests without response"]
        reply = await self._coordinated(INIT_PRODUCER_ID, version, request, lambda each: each.error_code)
        self._init_attempts = 1 + self.counts["requests without response"] - before
        self._adopt(reply)
        self.history.took_over(self.name, self.producer)
        self.loop.note("took over", self)
        if inherited is not None and reply.ongoing_txn_producer_id != inherited.producer.id:
            raise self.loop.fail(
                "a prepared transaction waits for its decision",
                f"{self} got {reply}, {inherited} had prepared one",
            )

    def _adopt(self, reply: Any) -> None:
        producer = Producer(int(reply.producer_id), int(reply.producer_epoch))
        if producer != self.producer:
            self._sequences.clear()
        self.producer = producer

    async def _end_inherited(self, inherited: Transactor) -> None:
        self.transaction = inherited.transaction
        try:
            await self.end(commit=inherited.commits_prepared)
        except (Failed, Fenced):
            if self._init_attempts > 1:  # an earlier attempt of its own InitProducerId may have come later
                self.is_prepared, self.commits_prepared = True, inherited.commits_prepared
                self.producer, self.transaction = inherited.producer, inherited.transaction
                raise Fenced from None
            raise self.loop.fail(
                "a prepared transaction waits for its decision", f"{self} may not decide about it"
            ) from None
        self.counts["prepared transactions ended"] += 1

    # -- one transaction -------------------------------------------------------------------------------

    def open(self) -> None:
        self.transaction = self.history.begins()
        self._added.clear()
        self._records = 0

    async def _add(self, place: Place) -> None:
        """With the older protocol the producer itself adds partitions. Raises Failed and Fenced."""
        if self.is_newer or place in self._added:
            return
        if place.topic == CONSUMER_OFFSETS:
            request = message(ADD_OFFSETS_TO_TXN, 3)(
                "AddOffsetsToTxnRequest",
                transactional_id=self.name,
                producer_id=self.producer.id,
                producer_epoch=self.producer.epoch,
                group_id=COPIES_GROUP,
            )
            await self._coordinated(ADD_OFFSETS_TO_TXN, 3, request, lambda reply: reply.error_code)
        else:
            new = message(ADD_PARTITIONS_TO_TXN, 3)
            request = new(
                "AddPartitionsToTxnRequest",
                v3_and_below_transactional_id=self.name,
                v3_and_below_producer_id=self.producer.id,
                v3_and_below_producer_epoch=self.producer.epoch,
                v3_and_below_topics=(
                    new("AddPartitionsToTxnTopic", name=place.topic, partitions=(place.partition,)),
                ),
            )
            await self._coordinated(
                ADD_PARTITIONS_TO_TXN,
                3,
                request,
                lambda reply: (
                    reply.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
                ),
            )
        self._added[place] = None

    def _batch(self, place: Place, copied: tuple[str, ...]) -> Batch:
        records = [Written(self.transaction, self._records + n, each) for n, each in enumerate(copied)]
        self._records += len(records)
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + len(records)
        return Batch(sequence, records)

    async def write(self, place: Place, contents: list[tuple[str, ...]]) -> None:
        """Write several batches to a partition, and have them in flight at once. Raises Failed and Fenced."""
        await self._add(place)
        window = [self._batch(place, each) for each in contents]
        while window:
            leader = self.cluster.leader_hint(*place)
            was_zombie = self.history.is_zombie(self.name, self.producer)
            version = 12 if self.is_newer else 11
            replies = await asyncio.gather(
                *(
                    self.produce(
                        *place,
                        batch.encode(self.producer),
                        node_id=leader,
                        transactional_id=self.name,
                        version=version,
                    )
                    for batch in window
                )
            )
            left: list[Batch] = []
            for batch, reply in zip(window, replies, strict=True):
                if reply is None or reply[0] is not ErrorCode.none:
                    # After a batch that was refused, the next one may be refused for its sequence.
                    if not (
                        left and reply is not None and reply[0] is ErrorCode.out_of_order_sequence_number
                    ):
                        self._check(None if reply is None else reply[0])
                    left.append(batch)
                    continue
                values = tuple(record.encode() for record in batch.records)
                self.history.accepted(self.name, self.producer, "Produce", was_zombie=was_zombie)
                self.world.committed.acknowledged(*place, reply[1], values)
                self.history.wrote(self.transaction, place, batch.records)
                self.counts["records acknowledged"] += len(values)
            window = left
            if window:
                await self.back_off()

    async def commit_offset(self, index: int, offset: int) -> None:
        """Raises Failed and Fenced."""
        await self._add(Place(CONSUMER_OFFSETS, 0))
        version = 5 if self.is_newer else 3
        new = message(TXN_OFFSET_COMMIT, version)
        part = new(
            "TxnOffsetCommitRequestPartition",
            partition_index=index,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata=None,
        )
        request = new(
            "TxnOffsetCommitRequest",
            transactional_id=self.name,
            group_id=COPIES_GROUP,
            producer_id=self.producer.id,
            producer_epoch=self.producer.epoch,
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=(new("TxnOffsetCommitRequestTopic", name="input", partitions=(part,)),),
        )
        while True:
            node_id = await self._coordinator(_GROUP, COPIES_GROUP)
            was_zombie = self.history.is_zombie(self.name, self.producer)
            reply = await self.call(node_id, TXN_OFFSET_COMMIT, version, request)
            error = None if reply is None else ErrorCode(reply.topics[0].partitions[0].error_code)
            if error is ErrorCode.none:
                self.history.accepted(self.name, self.producer, "TxnOffsetCommit", was_zombie=was_zombie)
                return
            if error is None or error in _MOVED:
                self._moved(_GROUP, COPIES_GROUP)
            self._check(error)
            await self.back_off()

    async def end(self, *, commit: bool) -> None:
        """Raises Fenced, and then the outcome is unknown."""
        transaction, self.transaction = self.transaction, 0
        if commit:
            self.history.wants_commit(transaction)
        version = 5 if self.is_newer else 3
        request = message(END_TXN, version)(
            "EndTxnRequest",
            transactional_id=self.name,
            producer_id=self.producer.id,
            producer_epoch=self.producer.epoch,
            committed=commit,
        )
        try:
            reply = await self._coordinated(END_TXN, version, request, lambda each: each.error_code)
        except Failed:
            raise Fenced from None
        if self.is_newer:
            self._adopt(reply)
        self.history.told(transaction, committed=commit)
        self.loop.note("committed" if commit else "aborted", transaction, self)
        self.counts["transactions committed" if commit else "transactions aborted"] += 1

    async def give_up(self) -> None:
        """Abort after an error. With the older protocol, sequences may have gaps then: it needs a new epoch."""
        await self.end(commit=False)
        if not self.is_newer:
            await self._init(continues=True)

    async def rest(self) -> None:
        """Now and then, a client takes too long."""
        is_slow = self.loop.chance(0.02) and not self.world.is_closing
        await asyncio.sleep(1.4 * TRANSACTION_TIMEOUT_S if is_slow else self.loop.between(*_PACE_S))


class Writer(Transactor):
    """Writes to several partitions at once."""

    async def work(self) -> None:
        while not self.world.is_closing:
            self.open()
            try:
                for _ in range(1 + self.loop.draw(2)):
                    await self._write_some()
                    await self.rest()
                if self.is_two_phase and self.loop.chance(0.3):
                    self._prepare()
                    return
                if not self.is_two_phase and self.loop.chance(0.08):
                    self.has_abandoned = True
                    self.counts["transactions abandoned"] += 1
                    return
                await self.end(commit=self.loop.chance(0.7))
            except Failed:
                await self.give_up()
            await self.rest()

    async def _write_some(self) -> None:
        places = self.world.places("ledger")
        if self.loop.chance(0.6):
            places = [places[self.loop.draw(len(places))]]
        outcomes = await asyncio.gather(
            *(self.write(place, self._contents()) for place in places), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _contents(self) -> list[tuple[str, ...]]:
        return [("",) * (1 + self.loop.draw(2)) for _ in range(1 + self.loop.draw(_WINDOW_MAX))]

    def _prepare(self) -> None:
        """From here on only its successor ends the transaction, however long that takes."""
        self.commits_prepared = self.loop.chance(0.7)
        self.is_prepared = True
        self.counts["transactions prepared"] += 1


class Copier(Transactor):
    """Copies one input partition, and commits its position together with the copies."""

    source = 0

    async def work(self) -> None:
        position = await self._position()
        while True:
            inputs = await self._read(position)
            if not inputs:
                await asyncio.sleep(self.loop.between(0.03, 0.12))
                continue
            self.open()
            try:
                await self._copy(inputs)
                await self.commit_offset(self.source, inputs[-1] + 1)
                await self.rest()
                await self.end(commit=True)
                self.counts["records copied"] += len(inputs)
                position = inputs[-1] + 1
                if self.loop.chance(0.3):
                    position = await self._position()  # as after a rebalance
            except Failed:
                await self.give_up()
                position = await self._position()

    async def _copy(self, inputs: list[int]) -> None:
        places = self.world.places("copies")
        for offset in inputs:
            place = places[self.loop.draw(len(places))]
            await self.write(place, [(f"{self.source}@{offset}",)])

    async def _read(self, position: int) -> list[int]:
        """Offsets of some input records."""
        part = await self.fetch("input", self.source, position, read_committed=True)
        if part is None or part.error_code != ErrorCode.none:
            await self.back_off()
            return []
        _, next_offset = fetched_records(part.records, position)
        # Of a damaged batch, which it would read from another replica, the offsets are enough here.
        known = self.world.committed.named("input", self.source).values
        return [offset for offset in range(position, next_offset) if offset in known][: 1 + self.loop.draw(4)]

    async def _position(self) -> int:
        """The committed offset, once no transaction may change it."""
        new = message(OFFSET_FETCH, 7)
        request = new(
            "OffsetFetchRequest",
            group_id=COPIES_GROUP,
            topics=(new("OffsetFetchRequestTopic", name="input", partition_indexes=(self.source,)),),
            require_stable=True,
        )
        while True:
            node_id = await self._coordinator(_GROUP, COPIES_GROUP)
            newest = self.world.newest_leader(CONSUMER_OFFSETS, 0)
            reply = await self.call(node_id, OFFSET_FETCH, 7, request)
            # A coordinator that does not know of its successor may return an old offset. Consumers that are members
            # of the group are safe from that.
            is_newest = newest == self.world.newest_leader(CONSUMER_OFFSETS, 0) and newest[0] == node_id
            if reply is not None and reply.error_code == ErrorCode.none and is_newest:
                part = reply.topics[0].partitions[0]
                if part.error_code == ErrorCode.none:
                    return max(0, int(part.committed_offset))
                self.counts["unstable offsets"] += 1
            else:
                self._moved(_GROUP, COPIES_GROUP)
            await self.back_off()
