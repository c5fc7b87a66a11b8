"""Scheduled delivery against what it promises: none early, none twice, none lost, in the order of their times.

The world has a source, a shard's log and a target that recognises producers' sequences. It is stopped between any two
steps: the shard's memory is gone then, and so may be the end of its log that was not committed yet.
"""

from collections.abc import Iterator
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import decode_records, read_header
from penstock.scheduling.intake import SCHEDULED_FOR, HeldBatch
from penstock.scheduling.ladder_queue import LadderQueue
from penstock.scheduling.release_batch import encode_release_batch, gather_due_records
from penstock.scheduling.schedule_log import (
    DUE_BYTES,
    DueEntry,
    HeldRecord,
    ReleasePlan,
    ScheduleSource,
    SourcePosition,
    StoredBlock,
    open_block,
    pack_block,
    read_stored_block,
    unpack_due,
)
from penstock.scheduling.schedule_shard import (
    FoundHeldBatch,
    KeyValue,
    ScheduleShard,
    cut_chunks,
    resume_from,
)

SOURCE = ScheduleSource(UUID(int=5), 3)
MAX_BYTES = 1 << 20


class Memory:
    """Blocks in a dictionary: whatever is read was written and not freed."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self._next = 0

    def write(self, block: bytes) -> int:
        self._next += 1
        self.blocks[self._next] = block
        return self._next

    def read(self, block_id: int) -> bytes:
        return self.blocks[block_id]

    def free(self, block_id: int) -> None:
        del self.blocks[block_id]


# -- the ladder ----------------------------------------------------------------------------------------------------

small = st.integers(0, 9)
dues = st.builds(DueEntry, st.integers(0, 2**40) | small, st.integers(0, 2**40) | small, small)


@settings(max_examples=300)
@given(steps=st.lists(st.lists(dues, max_size=60) | st.integers(0, 40), max_size=25))
def test_a_ladder_is_a_sorted_list(steps: list[list[DueEntry] | int]) -> None:
    memory = Memory()
    ladder, model = LadderQueue(memory, head_max=8, block_entries=4), set[bytes]()
    for step in steps:
        if isinstance(step, list):
            new = sorted({due.packed() for due in step} - model, key=lambda key: key[::-1])
            ladder.add(new)
            model.update(new)
        else:
            expected = sorted(model)[:step]
            assert list(ladder.peek(step)) == expected
            if expected:
                assert ladder.drop_upto(expected[-1]) == len(expected)
                model -= set(expected)
        assert len(ladder) == len(model)
        assert ladder.first() == min(model, default=None)
    assert list(ladder.peek(len(model))) == sorted(model)
    ladder.drop_upto(b"\xff" * DUE_BYTES)
    assert not memory.blocks, "blocks are given back"


def test_a_ladder_keeps_little_in_memory() -> None:
    memory = Memory()
    ladder = LadderQueue(memory, head_max=64, block_entries=16)
    keys = [DueEntry(7919 * n % 10_007, n, 0).packed() for n in range(20_000)]
    ladder.add(keys)
    for at in range(0, 20_000, 50):
        batch = ladder.peek(50)
        assert list(batch) == sorted(keys)[at : at + 50]
        ladder.drop_upto(batch[-1])
        assert len(ladder._head) <= 3 * 64, "what is sorted"
        assert sum(len(run.tail) for run in ladder._runs) <= 64 * 16 * DUE_BYTES, "what is not written yet"


# -- everything ----------------------------------------------------------------------------------------------------


class Index:
    def __init__(self) -> None:
        self.ladder = LadderQueue(Memory(), head_max=8, block_entries=4)

    def add(self, source: ScheduleSource, dues: list[bytes]) -> None:
        self.ladder.add(dues)

    def forget(self, source: ScheduleSource) -> None:
        raise AssertionError("no topic is deleted here")


class World:
    def __init__(self) -> None:
        self.now_ms = 1000
        self.source: list[FoundHeldBatch] = []
        self.due_of: dict[bytes, int] = {}
        self.log: dict[int, KeyValue] = {}
        self.end = self.committed = 0
        self.target: list[tuple[bytes, int]] = []
        self.producers: dict[int, tuple[int, int]] = {}
        self.next_producer = 0
        self.crashes = 0
        self._load()

    # the shard's log

    def _load(self) -> None:
        self.index = Index()
        self.shard = ScheduleShard(self.index)
        for is_group in (False, True):
            for offset, (key, value) in sorted(self.log.items()):
                if (len(key) > 22) == is_group:
                    self.shard.replay(offset, key, value)
        self.producer_id, self.sequence = -1, 0

    def append(self, records: list[KeyValue]) -> None:
        for key, value in records:
            self.log[self.end] = key, value
            self.shard.replay(self.end, key, value)
            self.end += 1

    def commit(self) -> None:
        self.committed = self.end

    def crash(self, keeps_tail: bool) -> None:
        self.crashes += 1
        if not keeps_tail:
            self.log = {offset: pair for offset, pair in self.log.items() if offset < self.committed}
            self.end = self.committed
        self.commit()
        self._load()

    def compact(self) -> None:
        latest = {key: offset for offset, (key, _) in sorted(self.log.items()) if offset < self.committed}
        self.log = {
            offset: (key, value)
            for offset, (key, value) in self.log.items()
            if offset >= self.committed or (latest[key] == offset and value is not None)
        }

    # producing

    def produce(self, delays_ms: list[int]) -> None:
        records = []
        for delay_ms in delays_ms:
            name = b"r%d" % len(self.due_of)
            self.due_of[name] = max(self.now_ms + delay_ms, 0)
            # A key of four bytes or less, and no value, as a batch encodes them.
            records.append(HeldRecord(self.due_of[name], bytes([2 * len(name)]) + name + b"\x01", 0, b""))
        held = HeldBatch(Codec.NONE, -1, -1, -1, 0, self.now_ms, open_block(pack_block(records)))
        offset = 2 * len(self.source)
        self.source.append(FoundHeldBatch(SourcePosition(0, offset), SourcePosition(0, offset + 2), held))

    # moving, one chunk at a time, from where the shard says

    def move(self) -> Iterator[None]:
        if self.shard.position(SOURCE) is None:
            self.append(self.shard.register(SOURCE, SourcePosition(0, 0)))
            yield
            self.commit()
            yield
        position = self.shard.position(SOURCE)
        assert position is not None
        found = [piece for piece in self.source if piece.at.offset >= position.offset]
        if found:
            found = resume_from(position, found)
        for chunk in cut_chunks(found, 40):
            records = self.shard.take(SOURCE, position, chunk, self.end)
            assert records
            self.append(records)
            assert not self.shard.take(SOURCE, position, chunk, self.end), "a repeat is not taken"
            position = chunk.position
            yield
        self.commit()

    # releasing, by plan

    def release(self) -> Iterator[None]:
        if SOURCE not in self.shard.sources:
            return
        done: list[int] | None = None
        if (plan := self.shard.sources[SOURCE].plan) is not None:
            if not plan.may_begin(self.now_ms):
                return
            done = yield from self._release(plan)
        while True:
            state = self.shard.sources[SOURCE]
            released = state.mark if state.plan is None else state.plan.upto
            due = [due for due in self._next(released, 3) if due.due_ms <= self.now_ms]
            if due:
                self.shard.reserve(SOURCE, due[-1].due_ms)
            yield
            if not due and done is None:
                return
            plan = None
            if due:
                if self.producer_id < 0:
                    self.producer_id, self.next_producer = self.next_producer, self.next_producer + 1
                plan = ReleasePlan(self.producer_id, 0, self.sequence, due[-1], len(due))
            self.append(self.shard.plan(SOURCE, plan, done or ()))
            self.shard.unreserve(SOURCE)
            yield
            self.commit()
            yield
            if plan is None:
                return
            done = yield from self._release(plan)
            self.sequence += plan.record_count

    def _release(self, plan: ReleasePlan) -> Iterator[None]:
        dues = self._next(self.shard.sources[SOURCE].mark, plan.record_count)
        offsets = sorted({due.offset for due in dues})
        release = gather_due_records(dues, ((offset, self._group(offset)) for offset in offsets), MAX_BYTES)
        assert release.dues[-1] == plan.upto, "a repeated plan has the same records"
        batch = encode_release_batch(
            release.records,
            producer_id=plan.producer_id,
            epoch=0,
            sequence=plan.sequence,
            now_ms=self.now_ms,
        )
        self._append_to_target(batch)
        yield
        return release.finished

    def _next(self, released: DueEntry, limit: int) -> list[DueEntry]:
        self.index.ladder.drop_upto(released.packed() if released.due_ms >= 0 else b"")
        return list(map(unpack_due, self.index.ladder.peek(limit)))

    def _group(self, offset: int) -> StoredBlock:
        value = self.log[offset][1]
        assert value is not None
        return read_stored_block(value)

    def _append_to_target(self, batch: bytearray) -> None:
        header = read_header(batch)
        sequences = header.base_sequence, header.last_offset_delta
        if self.producers.get(header.producer_id) == sequences:
            return  # it is there already
        before = self.producers.get(header.producer_id)
        assert header.base_sequence == (0 if before is None else sum(before) + 1), "no gap in a sequence"
        self.producers[header.producer_id] = sequences
        for record in decode_records(batch, MAX_BYTES):
            assert record.key is not None
            assert dict(record.headers)[SCHEDULED_FOR.decode()] == b"%d" % self.due_of[record.key]
            self.target.append((record.key, self.now_ms))


ACTIONS = st.one_of(
    st.tuples(st.just("produce"), st.lists(st.integers(-50, 200), min_size=1, max_size=8)),
    st.tuples(st.just("move"), st.none() | st.integers(1, 6)),
    st.tuples(st.just("release"), st.none() | st.integers(1, 9)),
    st.tuples(st.just("both"), st.lists(st.booleans(), max_size=30)),
    st.tuples(st.just("crash"), st.booleans()),
    st.tuples(st.just("wait"), st.integers(-30, 120)),
    st.tuples(st.just("compact"), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=5, max_size=60))
def test_each_record_comes_once_and_not_before_its_time(actions: list[tuple[str, object]]) -> None:
    world = World()
    for name, argument in actions:
        match name, argument:
            case "produce", list(delays_ms):
                world.produce(delays_ms)
            case "wait", int(ms):
                world.now_ms += ms  # clocks are set back, too
            case "crash", bool(keeps_tail):
                world.crash(keeps_tail)
            case "compact", _:
                world.compact()
            case "both", list(turns):
                works = world.move(), world.release()
                for is_move in turns:
                    next(works[is_move], None)
                world.crash(keeps_tail=len(turns) % 2 == 0)
            case _, steps:
                work = world.move() if name == "move" else world.release()
                for _ in (
                    work if steps is None else (step for step, _ in zip(work, range(steps), strict=False))
                ):
                    pass
                if steps is not None:
                    world.crash(keeps_tail=steps % 2 == 0)  # in the middle of it
        _check(world)
    world.now_ms += 1000
    _finish(world.move())
    _finish(world.release())
    _check(world)
    assert sorted(name for name, _ in world.target) == sorted(world.due_of), "none is lost"
    world.compact()
    assert len(world.log) <= 1, "nothing is left of what was released"


def _check(world: World) -> None:
    names = [name for name, _ in world.target]
    assert len(names) == len(set(names)), "none comes twice"
    assert all(at_ms >= world.due_of[name] for name, at_ms in world.target), "none comes early"


@given(delays_ms=st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_what_is_held_comes_in_the_order_of_its_times(delays_ms: list[int]) -> None:
    world = World()
    world.produce(delays_ms)
    _finish(world.move())
    for _ in range(12):
        world.now_ms += 10
        _finish(world.release())
    dues = [world.due_of[name] for name, _ in world.target]
    assert dues == sorted(dues)
    assert len(dues) == len(delays_ms)
    assert all(at_ms <= world.due_of[name] + 10 for name, at_ms in world.target), "nor late"


def test_what_arrives_late_while_others_are_released_is_not_passed_over() -> None:
    """Every order of the steps of a mover and of a release, and a crash after each of them."""
    for order in range(2**8):
        for crashes_after in (3, 5, 8):
            world = World()
            world.produce([5, 10, 15, 20])
            _finish(world.move())
            world.now_ms += 30
            world.produce([-40, -25, 1])
            works = world.move(), world.release()
            for turn in range(crashes_after):
                next(works[order >> turn & 1], None)
            world.crash(keeps_tail=bool(order & 1))
            world.now_ms += 30
            _finish(world.move())
            _finish(world.release())
            _check(world)
            assert len(world.target) == 7, f"order {order:08b}, crash after {crashes_after}"


def _finish(work: Iterator[None]) -> None:
    for _ in work:
        pass
