"""The schedule on the leader of its partition: what is held, in the order of its times, and its release by plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.scheduling.ladder_queue import LadderQueue
from penstock.scheduling.release import DueRecords, gather_due_records
from penstock.scheduling.schedule_log import (
    DueEntry,
    ReleasePlan,
    ScheduleSource,
    SourcePosition,
    StoredBlock,
    read_stored_block,
    source_of,
    unpack_due,
)
from penstock.scheduling.schedule_shard import HeldChunk, KeyValue, ScheduleShard
from simulation.coordinator import Coordinator
from simulation.replica import Key, Produce
from simulation.script import Ask, Local, Steps, play

if TYPE_CHECKING:
    from simulation.replica import Replica
    from simulation.simlog import Batch

_RECORDS_MAX: Final = 3
_BYTES_MAX: Final = 1 << 20
_PRODUCER_IDS: Final = 30_000
#: Nothing of the plan is in the log, and another producer can have it.
_OTHER_PRODUCER: Final = frozenset({ErrorCode.out_of_order_sequence_number, ErrorCode.invalid_producer_epoch})


class Released(NamedTuple):
    """What a record that was held looks like when it has been released."""

    name: bytes
    due_ms: int


class Work(NamedTuple):
    records: Sequence[KeyValue] = ()
    replies: tuple[tuple[Any, object], ...] = ()


class _Blocks:
    """Blocks of a ladder, in memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self._count = 0

    def write(self, block: bytes) -> int:
        self._count += 1
        self._blocks[self._count] = block
        return self._count

    def read(self, block_id: int) -> bytes:
        return self._blocks[block_id]

    def free(self, block_id: int) -> None:
        del self._blocks[block_id]


class _Index:
    def __init__(self) -> None:
        self.ladders: dict[ScheduleSource, LadderQueue] = {}

    def add(self, source: ScheduleSource, dues: Sequence[bytes]) -> None:
        if source not in self.ladders:
            self.ladders[source] = LadderQueue(_Blocks(), head_max=8, block_entries=4)
        self.ladders[source].add(dues)

    def forget(self, source: ScheduleSource) -> None:
        self.ladders.pop(source, None)


class Schedule:
    """The rules in the shape that the runtime carries; nothing in them runs out."""

    def __init__(self, replica: Replica) -> None:
        self.index = _Index()
        self.rules = ScheduleShard(self.index)
        self._log = replica.log

    def loaded(self, now_ms: int) -> Work:
        return Work()

    def tick(self, now_ms: int) -> Work:
        return Work()

    def next_deadline_ms(self) -> int | None:
        return None

    def clock_moved(self, by_ms: int) -> None:
        pass

    # --- operations ---

    def find(self, source: ScheduleSource, token: Any) -> Work:
        return Work(replies=((token, (self.rules.position(source),)),))

    def register(self, source: ScheduleSource, position: SourcePosition, token: Any) -> Work:
        known = self.rules.position(source)
        records = self.rules.register(source, position)
        return Work(records, ((token, (position if known is None else known,)),))

    def take(self, source: ScheduleSource, expected: SourcePosition, chunk: HeldChunk, token: Any) -> Work:
        records = self.rules.take(source, expected, chunk, self._log.end_offset)
        position = chunk.position if records else self.rules.position(source)
        return Work(records, ((token, (position,)),))

    def plan(
        self,
        source: ScheduleSource,
        plan: ReleasePlan | None,
        finished: Sequence[int],
        token: Any,
        *,
        is_repeat: bool = False,
    ) -> Work:
        return Work(self.rules.plan(source, plan, finished, is_repeat=is_repeat), ((token, True),))

    # --- what is held ---

    def next_dues(self, source: ScheduleSource, released: DueEntry, limit: int) -> list[DueEntry]:
        ladder = self.index.ladders.get(source)
        if ladder is None:
            return []
        ladder.drop_upto(released.packed() if released.due_ms >= 0 else b"")
        return list(map(unpack_due, ladder.peek(limit)))

    def group(self, offset: int) -> StoredBlock:
        (batch,) = self._log.read(offset, self._log.end_offset, 1)
        value = batch.payload[offset - batch.base_offset][1]
        assert value is not None
        return read_stored_block(value)

    def gathered(self, dues: Sequence[DueEntry]) -> DueRecords:
        offsets = dict.fromkeys(due.offset for due in dues)
        return gather_due_records(dues, ((offset, self.group(offset)) for offset in offsets), _BYTES_MAX)


class ScheduleHost(Coordinator):
    """Records have a meaning by their offsets here, and what is held is looked at once it is known what is released."""

    def replay_log(self, batches: list[Batch]) -> None:
        for is_group in (False, True):
            for batch in batches:
                self._replay(batch, is_group)

    def replay_batch(self, batch: Batch) -> None:
        self._replay(batch, None)

    def _replay(self, batch: Batch, is_group: bool | None) -> None:
        for place, (key, value) in enumerate(batch.payload):
            if is_group is None or source_of(key)[1] == is_group:
                self.shard.rules.replay(batch.base_offset + place, key, value)


def new_schedule(replica: Replica) -> Schedule:
    return Schedule(replica)


def release(host: ScheduleHost) -> None:
    Releaser(host).begin()


class Releaser:
    """For one life of the shard: source after source, each by a plan that is stored before anything is appended."""

    def __init__(self, host: ScheduleHost) -> None:
        self.host = host
        self.node = host.node
        self.schedule: Schedule = host.shard
        self._producers: dict[ScheduleSource, tuple[int, int]] = {}

    def begin(self) -> None:
        play(self.node, self._live())

    def _live(self) -> Steps:
        while not self.host.is_closed:
            for source in tuple(self.schedule.rules.sources):
                if not self.host.is_closed:
                    yield from self._release(source)
                    self.schedule.rules.unreserve(source)
            yield self.node.world.between(3, 20)

    def now_ms(self) -> int:
        return self.node.machine.clock.wall_ms()

    def _release(self, source: ScheduleSource) -> Steps:
        """All that is due of it. Each batch says that what was appended before is done, and what is planned next."""
        done: DueRecords | None = None
        plan = self.schedule.rules.sources[source].plan
        if plan is not None:
            if not (yield from self._is_committed(source)):
                return
            done = yield from self._append(source, self.planned(source, plan))
        while not self.host.is_closed:
            state = self.schedule.rules.sources[source]
            released = state.mark if state.plan is None else state.plan.upto
            release = self.next_due(source, released)
            if release is None and done is None:
                return
            yield self.node.world.between(0, 5)
            plan = None if release is None else self._plan(source, release)
            is_stored = yield from self.store(source, plan, () if done is None else done.finished)
            if release is None or not is_stored:
                return
            done = yield from self._append(source, release)

    def _is_committed(self, source: ScheduleSource) -> Steps:
        """What an earlier leader has left may not be committed yet, and be lost with this one."""
        reply = yield Local(
            lambda respond: self.host.submit(lambda shard, token, _: shard.find(source, token), respond)
        )
        return isinstance(reply, tuple)

    def next_due(self, source: ScheduleSource, released: DueEntry) -> DueRecords | None:
        now_ms = self.now_ms()
        dues = self.schedule.next_dues(source, released, _RECORDS_MAX)
        dues = [due for due in dues if due.due_ms <= now_ms]
        if not dues:
            return None
        self.schedule.rules.reserve(source, dues[-1].due_ms)
        return self.schedule.gathered(dues)

    def planned(self, source: ScheduleSource, plan: ReleasePlan) -> DueRecords:
        """The same records in the same order, whoever repeats it."""
        mark = self.schedule.rules.sources[source].mark
        release = self.schedule.gathered(self.schedule.next_dues(source, mark, plan.record_count))
        assert release.dues[-1] == plan.upto, f"{plan} ends at {release.dues[-1]}"
        return release

    def _plan(self, source: ScheduleSource, release: DueRecords) -> ReleasePlan:
        if source not in self._producers:
            self._producers[source] = (_PRODUCER_IDS + self.node.world.serial(), 0)
        producer_id, sequence = self._producers[source]
        return ReleasePlan(producer_id, 0, sequence, release.dues[-1], len(release.dues))

    def store(
        self,
        source: ScheduleSource,
        plan: ReleasePlan | None,
        finished: Sequence[int],
        *,
        is_repeat: bool = False,
    ) -> Steps:
        """Whether it is committed."""
        reply = yield Local(
            lambda respond: self.host.submit(
                lambda shard, token, _: shard.plan(source, plan, finished, token, is_repeat=is_repeat),
                respond,
            )
        )
        return reply is True

    def _append(self, source: ScheduleSource, release: DueRecords) -> Steps:
        key = Key(source.topic_id, source.partition)
        values = tuple(Released(record.key_value, record.due_ms) for record in release.records)
        while not self.host.is_closed:
            plan = self.schedule.rules.sources[source].plan
            assert plan is not None
            if not plan.may_begin(self.now_ms()):
                yield 10
                continue
            request = Produce(key, values, True, plan.producer_id, plan.epoch, plan.sequence)
            reply = yield Ask(key, "produce", request)
            error = None if reply is None else reply[0]
            if error is ErrorCode.none:
                self._appended(source, plan)
                return release
            if error in _OTHER_PRODUCER:
                self._producers.pop(source, None)
                yield from self.store(source, self._plan(source, release), (), is_repeat=True)
            yield self.node.world.between(5, 40)
        return release

    def _appended(self, source: ScheduleSource, plan: ReleasePlan) -> None:
        self.node.world.note("released", self.node.id, plan)
        known = self._producers.get(source)
        if known is not None and known[0] == plan.producer_id:
            self._producers[source] = (plan.producer_id, plan.sequence + plan.record_count)
