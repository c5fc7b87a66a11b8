"""Scheduled delivery: records that are held until they are due come once, never early, and none is lost.

Producers write plain records and records for later in the same batches: idempotent, careless, and in transactions. The
promises are checked when a batch is committed, and once more on what a consumer reads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import (
    TRANSACTIONAL,
    BatchHeader,
    Record,
    checksum,
    decode_records,
    encode_batch,
    iter_batches,
)
from penstock.scheduling.intake import DELIVER_AFTER, DELIVER_AT, SCHEDULED_FOR
from simulation.checks.committed import CommittedLogs
from simulation.checks.scheduling import CommittedSchedule
from simulation.client import FIND_COORDINATOR, INIT_PRODUCER_ID, Client, message
from simulation.cluster import Cluster, TopicShape
from simulation.engine.loop import VirtualLoop
from simulation.engine.system import WALL_EPOCH_S
from simulation.worlds.base import World

ADD_PARTITIONS_TO_TXN: Final = 24
END_TXN: Final = 26
_TRANSACTION: Final = 1  # the key type of FindCoordinator
#: Another producer owns the transactional id: this one's own InitProducerId, which came late.
_FENCED: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_txn_state,
        ErrorCode.invalid_producer_id_mapping,
    }
)

TOPIC: Final = "later"
#: How long records are held: hardly, less than a fail-over, more than one.
_DELAYS_MS: Final = ((0, 30), (20, 300), (200, 1_200))
_PACE_S: Final = (0.02, 0.12)
#: Some records are so large that the schedule stores a batch in several chunks, and releases what is due in parts.
_LARGE_BYTES: Final = (9_000, 18_000)
_LARGE_CHANCE: Final = 0.12
_LARGE_RECORDS_MAX: Final = 2  # in one batch, which has to fit max.message.bytes
_FILLING: Final = b"."
#: How long after the faults all due records come at the latest, unless a clock was ahead. A retry waits up to 8 s.
_LATE_S: Final = 25.0
#: Clocks are read in whole milliseconds.
_ROUNDING_MS: Final = 1


class Held(NamedTuple):
    """When a record is due: at a time, or after a delay that starts with its append."""

    at_ms: int | None
    delay_ms: int
    sent_ms: int
    size: int

    @property
    def header(self) -> tuple[str, bytes]:
        if self.at_ms is None:
            return DELIVER_AFTER.decode(), b"%d" % self.delay_ms
        return DELIVER_AT.decode(), b"%d" % self.at_ms


class Batch(NamedTuple):
    values: tuple[bytes, ...]
    held: dict[bytes, Held]  # by name

    @property
    def rest(self) -> tuple[bytes, ...]:
        """What consumers may read at once."""
        return tuple(value for value in self.values if name_of(value) not in self.held)

    def encode(
        self, producer_id: int = -1, epoch: int = -1, sequence: int = -1, *, is_transactional: bool = False
    ) -> bytearray:
        records = []
        for place, value in enumerate(self.values):
            held = self.held.get(name_of(value))
            records.append(Record(place, 1, None, value, () if held is None else (held.header,)))
        return encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL if is_transactional else 0,
        )


def name_of(value: bytes) -> bytes:
    return value.rstrip(_FILLING)


class ScheduleHistory:
    """What producers asked for, and what has come of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.loop: VirtualLoop = cluster.loop
        self.held: dict[bytes, Held] = {}
        #: Records that must come: acknowledged, and committed if they belong to a transaction.
        self.promised: dict[bytes, None] = {}
        #: Records of transactions that were not told to commit (yet): they must not come.
        self.open: dict[bytes, None] = {}
        self.aborted: dict[bytes, None] = {}
        self.released: dict[bytes, None] = {}
        #: How far a clock has ever been ahead of a correct one, and behind it.
        self._ahead_ms = self._behind_ms = 0

    def __repr__(self) -> str:
        return f"<ScheduleHistory: {len(self.held)} held, {len(self.released)} released>"

    @property
    def now_ms(self) -> int:
        """The time of a correct clock."""
        return int((self.loop.now + WALL_EPOCH_S) * 1000)

    def committed(self, topic: str, index: int, header: BatchHeader, records: list[Record]) -> None:
        if topic != TOPIC:
            return
        self._look_at_clocks()
        for record in records:
            if (record.value or b"").startswith(b"r"):
                self._released(index, record)

    def _released(self, index: int, record: Record) -> None:
        value = record.value or b""
        name, where = name_of(value), f"at {record.offset} of {TOPIC}-{index}"
        held = self.held.get(name)
        if held is None or len(value) != held.size:
            raise self.loop.fail("released records are what was sent", f"{value[:20]!r} {where}: {held}")
        if name in self.released:
            raise self.loop.fail("no scheduled record comes twice", f"{name!r} {where}")
        if name in self.open or name in self.aborted:
            raise self.loop.fail("only records of committed transactions come", f"{name!r} {where}")
        self._check_time(name, held, record)
        self.released[name] = None

    def _check_time(self, name: bytes, held: Held, record: Record) -> None:
        """No record comes early, by the clock of its releaser and by a correct one, as far as clocks are correct."""
        headers = dict(record.headers)
        if headers.keys() != {SCHEDULED_FOR.decode()}:
            raise self.loop.fail("released records say when they were due", f"{name!r}: {headers}")
        due_ms = int(headers[SCHEDULED_FOR.decode()] or b"")
        least_ms = held.sent_ms + held.delay_ms - self._behind_ms - _ROUNDING_MS
        # A delay starts with the append, by the clock of the leader.
        if due_ms < least_ms if held.at_ms is None else due_ms != held.at_ms:
            raise self.loop.fail("released records say when they were due", f"{name!r}: {held}, but {due_ms}")
        if due_ms > min(record.timestamp, self.now_ms + self._ahead_ms + _ROUNDING_MS):
            raise self.loop.fail(
                "no scheduled record comes early",
                f"{name!r}, {held}, released at {record.timestamp} by its own clock, {self.now_ms} by a correct one",
            )

    def abort(self, names: dict[bytes, Held]) -> None:
        """It is certain that the transaction of these records is aborted."""
        for name in names:
            if name in self.released:
                raise self.loop.fail("only records of committed transactions come", f"{name!r} is aborted")
            self.open.pop(name, None)
            self.aborted[name] = None

    @property
    def clocks_were_right(self) -> bool:
        return not (self._ahead_ms or self._behind_ms)

    def missing(self) -> list[bytes]:
        return [name for name in self.promised if name not in self.released]

    def _look_at_clocks(self) -> None:
        for machine in self.cluster.machines.values():
            skew_ms = int(machine.clock_skew_s * 1000)
            self._ahead_ms = max(self._ahead_ms, skew_ms)
            self._behind_ms = max(self._behind_ms, -skew_ms)


class Scheduler(Client):
    """What all producers of this world do: compose batches, and send one until it is acknowledged."""

    def __init__(self, world: ScheduleWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.history = world.history
        self.is_done = False
        #: What it has heard last of what it waits for.
        self.last_error = ""
        self.has_lost_replies = False
        self._serial = 0

    async def run(self) -> None:
        raise NotImplementedError

    async def live(self) -> None:
        await self.run()
        self.is_done = True

    def any_partition(self) -> int:
        return self.loop.draw(self.world.topic.partitions)

    async def rest(self) -> None:
        await asyncio.sleep(self.loop.between(*_PACE_S))

    def compose(self, count_max: int = 4) -> Batch:
        values, held, larges = [], {}, 0
        for _ in range(1 + self.loop.draw(count_max)):
            self._serial += 1
            if self.loop.chance(0.3):
                values.append(b"n%d-%d" % (self.number, self._serial))
                continue
            name = b"r%d-%d" % (self.number, self._serial)
            is_large = self.loop.chance(_LARGE_CHANCE) and larges < _LARGE_RECORDS_MAX
            larges += is_large
            filling = int(self.loop.between(*_LARGE_BYTES)) if is_large else 0
            values.append(name + _FILLING * filling)
            held[name] = self._when(len(values[-1]))
        self.history.held |= held
        return Batch(tuple(values), held)

    def _when(self, size: int) -> Held:
        now_ms = self.history.now_ms
        least, most = _DELAYS_MS[self.loop.draw(len(_DELAYS_MS))]
        delay_ms = least + self.loop.draw(most - least)
        return Held(None if self.loop.chance(0.3) else now_ms + delay_ms, delay_ms, now_ms, size)

    async def send(self, index: int, batch: Batch, producer_id: int, epoch: int, sequence: int) -> None:
        encoded = batch.encode(producer_id, epoch, sequence)
        while True:
            reply = await self.produce(TOPIC, index, encoded)
            if reply is not None and reply[0] is ErrorCode.none:
                self.acknowledged(index, reply[1], batch)
                return
            self.counts["batches sent again"] += 1
            await self.refused("Produce", reply)

    def acknowledged(self, index: int, base_offset: int, batch: Batch) -> None:
        self.world.committed.acknowledged(TOPIC, index, base_offset, batch.rest)
        self.history.promised |= dict.fromkeys(batch.held)
        self.counts["records held"] += len(batch.held)
        self.counts["records acknowledged"] += len(batch.values)

    async def init_producer_id(self, transactional_id: str | None = None) -> tuple[int, int]:
        request = message(INIT_PRODUCER_ID, 4)(
            "InitProducerIdRequest",
            transactional_id=transactional_id,
            transaction_timeout=timedelta(seconds=600),
            producer_id=-1,
            producer_epoch=-1,
        )
        while True:
            node = await self.coordinator(transactional_id) if transactional_id else self.any_node()
            reply = await self.call(node, INIT_PRODUCER_ID, 4, request, timeout_s=0.8)
            if reply is not None and reply.error_code == ErrorCode.none:
                return int(reply.producer_id), int(reply.producer_epoch)
            await self.refused("InitProducerId", reply)

    async def coordinator(self, transactional_id: str) -> int:
        request = message(FIND_COORDINATOR, 4)(
            "FindCoordinatorRequest", key_type=_TRANSACTION, coordinator_keys=(transactional_id,)
        )
        while True:
            reply = await self.call(self.any_node(), FIND_COORDINATOR, 4, request)
            if reply is not None and reply.coordinators[0].error_code == ErrorCode.none:
                return int(reply.coordinators[0].node_id)
            await self.refused("FindCoordinator", reply)

    async def refused(self, what: str, reply: object) -> None:
        self.last_error = f"{what}: {reply}"
        self.has_lost_replies = self.has_lost_replies or reply is None
        await self.back_off()


class IdempotentScheduler(Scheduler):
    """acks=all, one batch at a time, retries until it succeeds."""

    async def run(self) -> None:
        producer_id, epoch = await self.init_producer_id()
        sequences: Counter[int] = Counter()
        while not self.world.is_closing:
            index, batch = self.any_partition(), self.compose()
            await self.send(index, batch, producer_id, epoch, sequences[index])
            sequences[index] += len(batch.values)
            await self.rest()


class CarelessScheduler(Scheduler):
    """Has no producer id, and never retries: what was not acknowledged may come once, or never."""

    async def run(self) -> None:
        while not self.world.is_closing:
            index, batch = self.any_partition(), self.compose()
            reply = await self.produce(TOPIC, index, batch.encode())
            if reply is not None and reply[0] is ErrorCode.none:
                self.acknowledged(index, reply[1], batch)
            await self.rest()


class _Fenced(Exception):
    """A request of its own that came late has taken the transactional id over."""


class TransactionalScheduler(Scheduler):
    """Its records come if their transaction is committed. InitProducerId aborts one now and then."""

    def __init__(self, world: ScheduleWorld, number: int) -> None:
        super().__init__(world, number)
        self._started: list[Batch] = []

    async def run(self) -> None:
        transactional_id = f"scheduler-{self.number}"
        sequences: Counter[int] = Counter()
        producer_id, epoch = await self._init(transactional_id, sequences)
        while not self.world.is_closing:
            if self.has_lost_replies:
                # A request that is still on its way must not end the next transaction: a new epoch fences it.
                producer_id, epoch = await self._init(transactional_id, sequences)
            self._started = []
            try:
                await self._transact(transactional_id, producer_id, epoch, sequences)
            except _Fenced:
                producer_id, epoch = await self._init(transactional_id, sequences)
                # If it was about to commit, the outcome is unknown.
                self.history.abort(
                    {name: held for name, held in self._held().items() if name in self.history.open}
                )
                self.counts["transactions fenced"] += 1

    def _held(self) -> dict[bytes, Held]:
        return {name: when for batch in self._started for name, when in batch.held.items()}

    async def _transact(
        self, transactional_id: str, producer_id: int, epoch: int, sequences: Counter[int]
    ) -> None:
        for _ in range(1 + self.loop.draw(2)):
            index, batch = self.any_partition(), self.compose(3)
            self.history.open |= dict.fromkeys(batch.held)
            self._started.append(batch)
            await self._add_partition(transactional_id, producer_id, epoch, index)
            await self._send(transactional_id, index, batch, producer_id, epoch, sequences[index])
            sequences[index] += len(batch.values)
            await self.rest()
        held, end = self._held(), self.loop.draw(4)
        if end == 0:
            # The next transaction begins with a new epoch, which aborts this one.
            raise _Fenced
        if end == 1:
            await self._end(transactional_id, producer_id, epoch, committed=False)
            self.history.abort(held)
        else:
            for name in held:
                del self.history.open[name]
            await self._end(transactional_id, producer_id, epoch, committed=True)
            self.history.promised |= dict.fromkeys(held)
            self.counts["records held in transactions"] += len(held)
        self.counts["transactions committed" if end > 1 else "transactions aborted"] += 1

    def _check_fenced(self, error: int) -> None:
        if error in _FENCED:
            raise _Fenced

    async def _init(self, transactional_id: str, sequences: Counter[int]) -> tuple[int, int]:
        found = await self.init_producer_id(transactional_id)
        sequences.clear()
        self.has_lost_replies = False
        return found

    async def _send(
        self, transactional_id: str, index: int, batch: Batch, producer_id: int, epoch: int, sequence: int
    ) -> None:
        encoded = batch.encode(producer_id, epoch, sequence, is_transactional=True)
        while True:
            reply = await self.produce(TOPIC, index, encoded, transactional_id=transactional_id)
            if reply is not None and reply[0] is ErrorCode.none:
                self.world.committed.acknowledged(TOPIC, index, reply[1], batch.rest)
                return
            if reply is not None:
                self._check_fenced(reply[0])
            await self.refused("Produce", reply)

    async def _add_partition(self, transactional_id: str, producer_id: int, epoch: int, index: int) -> None:
        new = message(ADD_PARTITIONS_TO_TXN, 3)
        request = new(
            "AddPartitionsToTxnRequest",
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=(new("AddPartitionsToTxnTopic", name=TOPIC, partitions=(index,)),),
        )
        while True:
            node = await self.coordinator(transactional_id)
            reply = await self.call(node, ADD_PARTITIONS_TO_TXN, 3, request, timeout_s=0.8)
            if reply is not None:
                (result,) = reply.results_by_topic_v3_and_below[0].results_by_partition
                if result.partition_error_code == ErrorCode.none:
                    return
                self._check_fenced(result.partition_error_code)
            await self.refused("AddPartitionsToTxn", reply)

    async def _end(self, transactional_id: str, producer_id: int, epoch: int, *, committed: bool) -> None:
        request = message(END_TXN, 3)(
            "EndTxnRequest",
            transactional_id=transactional_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=committed,
        )
        while True:
            node = await self.coordinator(transactional_id)
            reply = await self.call(node, END_TXN, 3, request, timeout_s=0.8)
            if reply is not None and reply.error_code == ErrorCode.none:
                return
            if reply is not None:
                self._check_fenced(reply.error_code)
            await self.refused("EndTxn", reply)


class ScheduleConsumer(Client):
    """Reads everything below the high watermark, without regard to transactions."""

    def __init__(self, world: ScheduleWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.positions: Counter[int] = Counter()
        self.seen: dict[bytes, None] = {}
        self.damaged_batches = 0

    async def run(self, index: int) -> None:
        while True:
            position = self.positions[index]
            part = await self.fetch(TOPIC, index, position)
            if part is None or part.error_code != ErrorCode.none:
                await self.back_off()
                continue
            for header, batch in iter_batches(part.records or b""):
                if header.last_offset < position:
                    continue
                self.positions[index] = header.last_offset + 1
                if checksum(batch) != header.crc:
                    self.damaged_batches += 1
                elif not header.is_control:
                    self._read(batch, position)

    def _read(self, batch: memoryview, position: int) -> None:
        for record in decode_records(batch, 1 << 24):
            value = record.value or b""
            if record.offset < position or not value.startswith(b"r"):
                continue
            if name_of(value) in self.seen:
                raise self.loop.fail("no scheduled record comes twice", f"{name_of(value)!r} to a consumer")
            if name_of(value) not in self.world.history.released:
                raise self.loop.fail("consumers see committed data only", f"{name_of(value)!r} to a consumer")
            self.seen[name_of(value)] = None
            self.counts["records consumed"] += 1

    def has_read(self, index: int) -> bool:
        return self.positions[index] >= self.world.committed.named(TOPIC, index).end_offset


class ScheduleWorld(World):
    settings: ClassVar[Mapping[str, str]] = {"penstock.schedule.commit.timeout.ms": "600"}
    #: Records that come while a clock is ahead come after those that it has released: up to 20 seconds later.
    recovery_s = 70.0

    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        super().__init__(cluster, committed)
        configs = [("penstock.schedule.enable", "true")]
        if self.loop.chance(0.4):
            configs.append(("max.message.bytes", "40000"))  # less than may be due at once
        self.topic = TopicShape(TOPIC, 1 + self.loop.draw(2), configs=tuple(configs))
        self.history = ScheduleHistory(cluster)
        committed.on_committed.append(self.history.committed)
        self._schedule = CommittedSchedule(committed)
        self.producers: list[Scheduler] = [IdempotentScheduler(self, 1), CarelessScheduler(self, 2)]
        if self.loop.chance(0.5):
            self.producers.append(TransactionalScheduler(self, 3))
        else:
            self.producers.append(IdempotentScheduler(self, 3))
        self.consumer = ScheduleConsumer(self, 4)
        self._closed_at = 0.0

    @contextmanager
    def observing(self) -> Iterator[None]:
        with self._schedule.observing():
            yield

    @property
    def topics(self) -> tuple[TopicShape, ...]:
        return (self.topic,)

    @property
    def clients(self) -> list[Client]:
        return [*self.producers, self.consumer]

    def begin(self) -> None:
        for producer in self.producers:
            producer.spawn(producer.live())
        for index in range(self.topic.partitions):
            self.consumer.spawn(self.consumer.run(index))

    @property
    def has_begun(self) -> bool:
        return len(self.consumer.seen) >= 3

    def close(self) -> None:
        super().close()
        self._closed_at = self.loop.now
        for machine in self.cluster.machines.values():
            machine.clock_skew_s = 0.0

    def unfinished(self) -> str | None:
        for producer in self.producers:
            if not producer.is_done:
                return f"{producer} waits, {producer.last_error}"
        if missing := self.history.missing():
            late = f"{len(missing)} acknowledged records have not come: {missing[:3]}"
            if self.loop.now - self._closed_at > _LATE_S and self.history.clocks_were_right:
                raise self.loop.fail("due records come soon", late)
            return late
        for index in range(self.topic.partitions):
            if not self.consumer.has_read(index):
                return f"the consumer has not read all of {TOPIC}-{index}"
        return None

    def finish(self) -> None:
        history, consumer = self.history, self.consumer
        self.counts["records released"] += len(history.released)
        unseen = [name for name in history.released if name not in consumer.seen]
        if unseen and not consumer.damaged_batches:
            raise self.loop.fail("consumers see every released record", f"{unseen[:3]} not seen")
