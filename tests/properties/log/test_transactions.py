"""Transactions in a log compared with a list of appends: the last stable offset, and what readers see."""

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.log.helpers import NOW_MS, batch_of, flush, marker_of, open_log

from penstock.log.compaction.cleaner import CleanableLog, LogCleaner
from penstock.log.config import LogConfig
from penstock.log.segment_files import FilePool
from penstock.protocol.record_batch import TRANSACTIONAL, decode_records, iter_batches, parse_end_marker

DAY_MS = 86_400_000
PLAIN = 0  # the producer id of batches without one

producers = st.integers(1, 4)
counts = st.integers(1, 3)
shares = st.floats(0, 1)
steps = st.one_of(
    st.tuples(st.just("plain"), counts),
    st.tuples(st.just("transactional"), producers, counts),
    st.tuples(st.just("transactional"), producers, counts),
    st.tuples(st.just("end"), producers, st.booleans(), st.booleans()),
    st.tuples(st.just("end"), producers, st.just(False), st.booleans()),
    st.tuples(st.just("roll")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("move_high_watermark"), shares),
    st.tuples(st.just("move_high_watermark"), st.just(1)),
    st.tuples(st.just("truncate"), shares),
    st.tuples(st.just("restart"), st.sampled_from(["cleanly", "after a crash", "with torn indexes"])),
)
compacting_steps = st.one_of(steps, st.tuples(st.just("clean"), st.integers(0, 2 * DAY_MS)))
# Long ones, as what is wrong takes several steps to show.
histories = st.lists(steps, min_size=10, max_size=80)
compacting_histories = st.lists(compacting_steps, min_size=10, max_size=80)
fast = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Entry(NamedTuple):
    """A batch of data, or a marker when `committed` says how it ended."""

    base_offset: int
    last_offset: int
    producer_id: int
    values: tuple[bytes, ...] = ()
    committed: bool | None = None


class Transaction(NamedTuple):
    producer_id: int
    first_offset: int
    marker_offset: int | None
    committed: bool | None


@dataclass
class World:
    directory: Path
    entries: list[Entry] = field(default_factory=list)
    high_watermark: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    now_ms: int = NOW_MS
    was_cleaned: bool = False

    def __post_init__(self) -> None:
        self.cleaner = LogCleaner(self.directory, dedupe_buffer_bytes=1 << 16)
        self.open()

    def open(self, **options: Any) -> None:
        config = LogConfig(segment_bytes=600, cleanup_compact=True, min_cleanable_dirty_ratio=0.0)
        # No index stays in memory that can be loaded again.
        self.log = open_log(self.directory / "t-0", config, files=FilePool(index_bytes_max=0), **options)

    def do(self, step: tuple[Any, ...]) -> None:
        getattr(self, step[0])(*step[1:])

    # What happens

    def plain(self, count: int) -> None:
        self.data(PLAIN, count)

    def transactional(self, producer: int, count: int) -> None:
        self.data(producer, count)

    def data(self, producer: int, count: int) -> None:
        values = tuple(b"%d" % (self.log.end_offset + n) for n in range(count))
        sender = None
        if producer != PLAIN:
            state, epoch = self.log.producers.states.get(producer), self.epochs.setdefault(producer, 0)
            sequence = state.next_sequence if state is not None and state.epoch == epoch else 0
            sender = (producer, epoch, sequence)
        batch = batch_of(*values, producer=sender, attributes=TRANSACTIONAL if sender else 0)
        appended = self.log.append(batch, leader_epoch=0, now_ms=NOW_MS)
        self.entries.append(Entry(appended.base_offset, appended.last_offset, producer, values))

    def end(self, producer: int, committed: bool, is_new_epoch: bool) -> None:
        """Also where nothing is open: coordinators fence producers that way."""
        epoch = self.epochs.get(producer, 0) + is_new_epoch
        self.epochs[producer] = epoch
        marker = marker_of(producer, epoch, commit=committed)
        appended = self.log.append(marker, leader_epoch=0, now_ms=NOW_MS, internal=True)
        self.entries.append(Entry(appended.base_offset, appended.last_offset, producer, (), committed))

    def roll(self) -> None:
        if self.log.active_segment.size:
            self.log.roll(NOW_MS)

    def flush(self) -> None:
        flush(self.log)

    def move_high_watermark(self, share: float) -> None:
        boundaries = [self.high_watermark]
        boundaries += [e.last_offset + 1 for e in self.entries if e.last_offset >= self.high_watermark]
        self.high_watermark = boundaries[int(share * (len(boundaries) - 1))]

    def truncate(self, share: float) -> None:
        cut = [e for e in self.entries if e.base_offset >= self.high_watermark]
        if not cut:
            return
        offset = cut[int(share * (len(cut) - 1))].base_offset
        self.log.truncate_to(offset, NOW_MS)
        self.cleaner.truncated(("t", 0), offset)
        self.entries = [e for e in self.entries if e.base_offset < offset]

    def restart(self, how: str) -> None:
        recovery_point = self.log.recovery_point
        if how == "after a crash":
            self.log.abandon()
        else:
            self.log.close()
        if how == "with torn indexes":
            for index in self.log.directory.glob("*.txnindex"):
                index.write_bytes(index.read_bytes()[:-1])
        self.open(clean=how != "after a crash", recovery_point=recovery_point)
        # A lone replica takes all that it has for committed.
        self.high_watermark = self.log.end_offset

    def clean(self, later_ms: int) -> None:
        self.now_ms += later_ms
        before = self.newest_by_key(self.read_committed(0, 1 << 20))
        stable_offset = self.last_stable_offset()
        cleanable = CleanableLog(self.log, stable_offset, self.high_watermark)
        report = self.cleaner.clean_filthiest_log({("t", 0): cleanable}, now_ms=self.now_ms)
        assert report is None or report.error is None
        self.was_cleaned = self.was_cleaned or report is not None
        for path in () if report is None else report.unlink:
            path.unlink()
        assert self.newest_by_key(self.read_committed(0, 1 << 20)) == before

    @staticmethod
    def newest_by_key(found: dict[int, bytes]) -> tuple[int, bytes] | None:
        """All records have one key, so the newest is what a compacted log keeps."""
        return max(found.items(), default=None)

    # What the list says

    def transactions(self) -> list[Transaction]:
        open_offsets: dict[int, int] = {}
        ended: list[Transaction] = []
        for entry in self.entries:
            if entry.committed is None and entry.producer_id != PLAIN:
                open_offsets.setdefault(entry.producer_id, entry.base_offset)
            elif entry.committed is not None and entry.producer_id in open_offsets:
                first_offset = open_offsets.pop(entry.producer_id)
                ended.append(Transaction(entry.producer_id, first_offset, entry.base_offset, entry.committed))
        return ended + [Transaction(producer, first, None, None) for producer, first in open_offsets.items()]

    def expected_stable_offset(self) -> int:
        high_watermark = self.high_watermark
        held_back = [
            transaction.first_offset
            for transaction in self.transactions()
            if transaction.marker_offset is None or transaction.marker_offset >= high_watermark
        ]
        return min([high_watermark, *held_back])

    def expected_aborted(self, start_offset: int, upto_offset: int) -> list[tuple[int, int]]:
        return [
            (transaction.producer_id, transaction.first_offset)
            for transaction in self.transactions()
            if transaction.committed is False
            and transaction.first_offset < upto_offset
            and (transaction.marker_offset or 0) >= start_offset
        ]

    def committed_values(self, upto_offset: int) -> dict[int, bytes]:
        spans = [(t.producer_id, t.first_offset, t.marker_offset) for t in self.transactions() if t.committed]
        found: dict[int, bytes] = {}
        for entry in self.entries:
            is_committed = entry.producer_id == PLAIN or any(
                producer == entry.producer_id and first <= entry.base_offset < (marker or 0)
                for producer, first, marker in spans
            )
            if entry.committed is None and is_committed and entry.last_offset < upto_offset:
                found |= {entry.base_offset + n: value for n, value in enumerate(entry.values)}
        return found

    # What the log says

    def last_stable_offset(self) -> int:
        unstable = self.log.producers.transactions.first_unstable_offset(self.high_watermark)
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    def check_aborted(self, start_offset: int, upto_offset: int) -> None:
        found = self.log.aborted_in(start_offset, upto_offset)
        assert sorted(found) == sorted(self.expected_aborted(start_offset, upto_offset))

    def read_committed(self, offset: int, max_bytes: int) -> dict[int, bytes]:
        """As clients do it: skip what a producer wrote from an aborted transaction's start to its marker."""
        found: dict[int, bytes] = {}
        stable = self.log.position_of(self.last_stable_offset())
        while offset < stable.offset:
            piece = self.log.read(offset, max_bytes, stable)
            if not piece.data:
                break
            aborted = deque(sorted(self.log.aborted_in(offset, piece.next_offset), key=lambda pair: pair[1]))
            skipped: set[int] = set()
            for header, batch in iter_batches(piece.data):
                while aborted and aborted[0][1] <= header.last_offset:
                    skipped.add(aborted.popleft()[0])
                if header.is_control:
                    marker = parse_end_marker(batch)
                    if marker is not None and not marker.committed:
                        skipped.discard(header.producer_id)
                elif not (header.is_transactional and header.producer_id in skipped):
                    for record in decode_records(batch, 1 << 20):
                        if record.offset >= offset:
                            found[record.offset] = record.value or b""
            offset = piece.next_offset
        return found


@contextmanager
def worlds() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        yield world
        world.log.abandon()


@fast
@given(histories, st.data())
def test_stable_offset_and_aborted_transactions_are_what_a_list_says(
    history: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    with worlds() as world:
        for step in history:
            world.do(step)
            assert world.last_stable_offset() == world.expected_stable_offset(), step
            world.check_aborted(0, world.last_stable_offset())
        world.move_high_watermark(1)
        stable_offset = world.last_stable_offset()
        for _ in range(5):
            start_offset = data.draw(st.integers(0, stable_offset))
            upto_offset = data.draw(st.integers(start_offset, stable_offset))
            world.check_aborted(start_offset, upto_offset)


@fast
@given(histories, st.integers(1, 600), st.data())
def test_readers_of_what_is_committed_see_all_of_it_and_nothing_else(
    history: list[tuple[Any, ...]], max_bytes: int, data: st.DataObject
) -> None:
    with worlds() as world:
        for step in history:
            world.do(step)
        world.move_high_watermark(1)
        start_offset = data.draw(st.integers(0, world.last_stable_offset()))
        expected = world.committed_values(world.last_stable_offset())
        assert world.read_committed(start_offset, max_bytes) == {
            offset: value for offset, value in expected.items() if offset >= start_offset
        }


#: Compaction took what the last sync had reached: no damage.
CLEANED_BEYOND_SYNC = [
    *[("plain", 1)] * 9,
    ("flush",),
    *[("plain", 1)] * 8,
    ("move_high_watermark", 1),
    ("clean", 0),
    ("restart", "after a crash"),
]
#: The files of an index that are left from a clean stop do not know of the transaction that was aborted after it.
ABORTED_AFTER_A_CLEAN_STOP = [
    *[("plain", 1)] * 6,
    ("transactional", 4, 1),
    ("restart", "cleanly"),
    ("end", 4, False, False),
    ("flush",),
    ("plain", 1),
    ("restart", "after a crash"),
]


@fast
@given(compacting_histories, st.integers(1, 600))
@example(CLEANED_BEYOND_SYNC, 1)
@example(ABORTED_AFTER_A_CLEAN_STOP, 1)
def test_compaction_shows_readers_of_what_is_committed_nothing_else(
    history: list[tuple[Any, ...]], max_bytes: int
) -> None:
    with worlds() as world:
        for step in history:
            world.do(step)
            assert world.last_stable_offset() <= world.high_watermark
        expected = world.committed_values(world.last_stable_offset())
        found = world.read_committed(0, max_bytes)
        assert found.items() <= expected.items()
        assert world.newest_by_key(found) == world.newest_by_key(expected)
        if not world.was_cleaned:
            assert found == expected
