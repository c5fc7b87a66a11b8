"""Compaction compared with a dict: a reader that keeps the newest values sees the same."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compacting import DAY_MS, NOW_MS, append, append_marker, clean, open_log, records, roll

from penstock.log.compaction.batch_filter import OffsetMap
from penstock.log.compaction.cleaner import CleaningReport, LogCleaner
from penstock.log.log import Log
from penstock.protocol.compression import Codec

KEYS = [
    b"",
    b"a",
    b"b",
    b"c",
    b"\x00\x00\x00\x00",
    b"\x00\x00\x00\x01",
    b"a long key that is hashed like all",
]
keys = st.sampled_from(KEYS)
values = st.none() | st.sampled_from([b"", b"x", b"y" * 40])
contents = st.lists(st.tuples(keys, values), min_size=1, max_size=6)
codecs = st.sampled_from(Codec)
producers = st.integers(1, 3)

steps = st.one_of(
    st.tuples(st.just("plain"), contents, codecs),
    st.tuples(st.just("plain"), contents, codecs),
    st.tuples(st.just("idempotent"), contents, producers),
    st.tuples(st.just("transactional"), contents, producers, codecs),
    st.tuples(st.just("end"), producers, st.booleans()),
    st.tuples(st.just("roll")),
    st.tuples(st.just("clean"), st.integers(0, 2 * DAY_MS)),
    st.tuples(st.just("restart"), st.booleans()),
)
#: From "two keys at a time" to "all that there are".
buffers = st.sampled_from([24 * 4, 24 * 8, 1 << 16])

Stored = tuple[int, bytes | None, bytes | None]


@dataclass
class World:
    """A log and, beside it, everything that was ever appended to it."""

    directory: Path
    buffer_bytes: int
    now_ms: int = NOW_MS
    appended: dict[int, Stored] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    open_offsets: dict[int, list[int]] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open(clean=False)

    def open(self, *, clean: bool) -> None:
        self.log = open_log(self.directory / "table-0", clean=clean, segment_bytes=700)
        self.cleaner = LogCleaner(self.directory, dedupe_buffer_bytes=self.buffer_bytes)

    def do(self, step: tuple[Any, ...]) -> None:
        getattr(self, step[0])(*step[1:])

    def plain(self, pairs: list[tuple[bytes, bytes | None]], codec: Codec) -> None:
        self.remember(append(self.log, *pairs, codec=codec), pairs)

    def idempotent(self, pairs: list[tuple[bytes, bytes | None]], producer: int) -> None:
        self.sequenced(pairs, producer + 10, transactional=False)

    def transactional(self, pairs: list[tuple[bytes, bytes | None]], producer: int, codec: Codec) -> None:
        offsets = self.sequenced(pairs, producer, transactional=True, codec=codec)
        self.open_offsets.setdefault(producer, []).extend(offsets)

    def sequenced(
        self,
        pairs: list[tuple[bytes, bytes | None]],
        producer: int,
        *,
        transactional: bool,
        codec: Codec = Codec.NONE,
    ) -> range:
        sequence = self.sequences.get(producer, 0)
        self.sequences[producer] = sequence + len(pairs)
        base = append(
            self.log, *pairs, codec=codec, producer=(producer, 0, sequence), transactional=transactional
        )
        return self.remember(base, pairs)

    def remember(self, base: int, pairs: list[tuple[bytes, bytes | None]]) -> range:
        for n, (key, value) in enumerate(pairs):
            self.appended[base + n] = (base + n, key, value)
        return range(base, base + len(pairs))

    def end(self, producer: int, commit: bool) -> None:
        offsets = self.open_offsets.pop(producer, None)
        if offsets is None:
            return
        append_marker(self.log, producer, 0, commit=commit)
        if not commit:
            self.aborted.update(offsets)

    def roll(self) -> None:
        roll(self.log)

    def restart(self, cleanly: bool) -> None:
        if cleanly:
            self.log.close()
        else:
            self.log.abandon()
        self.open(clean=cleanly)

    def clean(self, later_ms: int) -> None:
        self.now_ms += later_ms
        untouchable = min(self.stable_offset, self.log.active_segment.base_offset)
        before = self.read()
        report = clean(self.log, self.cleaner, now_ms=self.now_ms, stable_offset=self.stable_offset)
        self.check(self.log)
        after = self.read()
        assert [r for r in after if r[0] >= untouchable] == [r for r in before if r[0] >= untouchable]
        if report is not None:
            assert report.error is None
            self.check_compacted(report, after)

    @property
    def stable_offset(self) -> int:
        first_open = self.log.producers.transactions.first_open_offset
        return self.log.end_offset if first_open is None else first_open

    def read(self, from_offset: int | None = None) -> list[Stored]:
        return [(record.offset, record.key, record.value) for record in records(self.log, from_offset)]

    def check(self, log: Log) -> None:
        """What every reader relies on, at any moment."""
        found = [(record.offset, record.key, record.value) for record in records(log)]
        assert [self.appended[offset] for offset, _, _ in found] == found, "as appended, in order"
        assert log.end_offset >= max(self.appended, default=-1) + 1
        assert self.table(found) == self.table(self.appended.values())

    def table(self, stored: Any) -> dict[bytes | None, Stored]:
        """The newest committed record of each key, deleted keys left out."""
        newest = {record[1]: record for record in stored if record[0] not in self.aborted}
        return {key: record for key, record in newest.items() if record[2] is not None}

    def check_compacted(self, report: CleaningReport, found: list[Stored]) -> None:
        """Below the end of the pass there is no second record of a key, nor one that was aborted."""
        undecided = {offset for offsets in self.open_offsets.values() for offset in offsets}
        done = [r for r in found if r[0] < report.next_dirty_offset and r[0] not in undecided]
        assert len({key for _, key, _ in done}) == len(done)
        assert not self.aborted.intersection(offset for offset, _, _ in done)
        assert report.next_dirty_offset > report.first_dirty_offset


@contextmanager
def worlds(buffer_bytes: int) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), buffer_bytes)
        yield world
        world.log.abandon()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(history=st.lists(steps, max_size=40), buffer_bytes=buffers)
def test_a_compacted_log_equals_a_dict(history: list[tuple[Any, ...]], buffer_bytes: int) -> None:
    with worlds(buffer_bytes) as world:
        for step in history:
            world.do(step)
        world.check(world.log)
        everything = world.read()
        for offset in range(world.log.end_offset + 1):
            assert world.read(offset) == [record for record in everything if record[0] >= offset]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(history=st.lists(steps, max_size=30), cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_restarts_forget_no_producer(history: list[tuple[Any, ...]], cuts: list[int]) -> None:
    with worlds(1 << 16) as world:
        for number, step in enumerate(history):
            world.do(step)
            if number in cuts:
                world.roll()
                world.clean(DAY_MS)
        expected = dict(world.sequences)
        for snapshot in world.log.directory.glob("*.snapshot"):
            snapshot.unlink()
        world.restart(cleanly=False)
        states = world.log.producers.states
        assert {producer: states[producer].next_sequence for producer in expected} == expected


@contextmanager
def photographed(directory: Path, album: Path) -> Iterator[list[Path]]:
    """A copy of the folder as it is before each step that a crash could come in front of."""
    pictures: list[Path] = []

    def photographing(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            pictures.append(album / str(len(pictures)))
            shutil.copytree(directory, pictures[-1])
            return real(*args, **kwargs)

        return step

    steps_on_disk = ("rename", "replace", "unlink", "fsync", "fdatasync")
    with mock.patch.multiple(os, **{name: photographing(getattr(os, name)) for name in steps_on_disk}):
        yield pictures


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(history=st.lists(steps, min_size=5, max_size=25))
def test_a_crash_at_any_step_of_a_pass_leaves_a_whole_log(history: list[tuple[Any, ...]]) -> None:
    with worlds(1 << 16) as world, tempfile.TemporaryDirectory() as album:
        for step in history:
            world.do(step)
        world.roll()
        with photographed(world.directory, Path(album)) as pictures:
            world.clean(DAY_MS)
        end_offset = world.log.end_offset
        for picture in pictures:
            survivor = open_log(picture / "table-0", segment_bytes=700)
            world.check(survivor)
            assert survivor.end_offset == end_offset
            leftover = [path.name for path in (picture / "table-0").iterdir() if path.name.count(".") > 1]
            assert leftover == []
            survivor.abandon()


@given(
    puts=st.lists(st.integers(0, 40).map(lambda n: b"key-%d" % n), max_size=120),
    max_bytes=st.integers(48, 24 * 200),
)
def test_the_key_map_equals_a_dict_until_it_is_full(puts: list[bytes], max_bytes: int) -> None:
    keymap, model = OffsetMap(max_bytes), dict[bytes, int]()
    for offset, key in enumerate(puts):
        if not keymap.put(key, offset):
            assert key not in model
            assert model, "a map that takes nothing would never get anywhere"
            break
        model[key] = offset
    assert {key: keymap.get(key) for key in model} == model
    assert keymap.get(b"never put") == -1
    assert keymap.entries == len(model)
    assert keymap.latest_offset == max(model.values(), default=-1)
    assert keymap.size_bytes <= max_bytes
