"""A log compared with a model: a list of batches."""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log.helpers import NOW_MS, append, batch_of, flush, open_log, read_batches

from penstock.log.config import LogConfig
from penstock.log.index_files import largest_timestamp, offset_index
from penstock.log.log import Log
from penstock.log.segment import iter_batch_headers
from penstock.log.segment_files import FilePool
from penstock.protocol.record_batch import iter_batches

#: Records in a batch, bytes of each value, milliseconds since NOW_MS.
batches = st.tuples(st.integers(1, 4), st.integers(0, 120), st.integers(-1000, 1000))
histories = st.lists(batches, min_size=1, max_size=40)
configs = st.builds(
    partial(LogConfig),  # or hypothesis would make up the fields that are not named here, too
    segment_bytes=st.integers(700, 3000),
    index_interval_bytes=st.integers(0, 500),
    segment_index_bytes=st.integers(60, 400),
    segment_ms=st.integers(100, 3000),
)
fast = settings(max_examples=60, deadline=None)


@contextmanager
def a_log(
    config: LogConfig, history: list[tuple[int, int, int]]
) -> Iterator[tuple[Log, list[tuple[int, bytes]]]]:
    """The log, and for each of its batches the base offset and the bytes."""
    with tempfile.TemporaryDirectory() as folder:
        log = open_log(Path(folder) / "t-0", config)
        model = []
        for count, size, at in history:
            batch = batch_of(*[bytes([n]) * size for n in range(count)], timestamp=NOW_MS + at)
            result = log.append(batch, leader_epoch=0, now_ms=NOW_MS)
            model.append((result.base_offset, bytes(batch)))
        yield log, model
        log.abandon()


def expected_slice(
    log: Log, model: list[tuple[int, bytes]], offset: int, max_bytes: int, upto: int
) -> list[int]:
    """The base offsets that a read has to return, worked out batch by batch."""
    ends = [base for base, _ in model[1:]] + [log.end_offset]
    first = next(place for place, end in enumerate(ends) if end > offset)
    found, size = [], 0
    segment = max(s.base_offset for s in log.segments if s.base_offset <= model[first][0])
    for (base, data), end in zip(model[first:], ends[first:], strict=True):
        same_segment = max(s.base_offset for s in log.segments if s.base_offset <= base) == segment
        if end > upto or not same_segment or (found and size + len(data) > max_bytes):
            break
        found.append(base)
        size += len(data)
    return found


@fast
@given(configs, histories, st.data())
def test_every_read_is_what_the_model_says(config, history, data):
    with a_log(config, history) as (log, model):
        for _ in range(15):
            offset = data.draw(st.integers(0, log.end_offset - 1))
            max_bytes = data.draw(st.integers(1, 2000))
            upto = data.draw(st.sampled_from([base for base, _ in model] + [log.end_offset]))
            piece = log.read(offset, max_bytes, log.position_of(upto))
            got = [(header.base_offset, bytes(batch)) for header, batch in iter_batches(piece.data)]
            if offset >= upto:
                assert got == []
                continue
            bases = expected_slice(log, model, offset, max_bytes, upto)
            assert got == [item for item in model if item[0] in bases]
            assert piece.next_offset == next((base for base, _ in model if base > bases[-1]), log.end_offset)


@fast
@given(configs, histories)
def test_the_index_finds_what_a_scan_finds(config, history):
    with a_log(config, history) as (log, _):
        flush(log)
        for segment in log.segments:
            with open(segment.path, "rb") as file:
                scan = list(iter_batch_headers(file.fileno(), 0, segment.size))
            index = offset_index(segment, log.files)
            starts = {position for position, _ in scan}
            for position, header in scan:
                found = index.position_at_or_below(header.last_offset - segment.base_offset)
                assert found in starts | {0}
                assert found <= position
            assert {index.boundary_at_or_below(position) for position in range(segment.size)} <= starts | {0}


@fast
@given(configs, histories, st.booleans())
def test_a_restart_changes_nothing(config, history, clean):
    with a_log(config, history) as (log, model):
        before = (log.end, [(s.base_offset, s.size, s.max_timestamp) for s in log.segments])
        timestamps = [log.offset_for_timestamp(NOW_MS + at) for at in range(-1000, 1001, 250)]
        log.close()
        reopened = open_log(log.directory, config, clean=clean)
        assert [(h.base_offset, batch) for h, batch in read_batches(reopened)] == model
        assert [reopened.offset_for_timestamp(NOW_MS + at) for at in range(-1000, 1001, 250)] == timestamps
        after = [(s.base_offset, s.size, largest_timestamp(s, reopened.files)) for s in reopened.segments]
        assert (reopened.end, after) == before
        reopened.abandon()


@fast
@given(configs, histories, st.data())
def test_truncation_leaves_a_prefix_and_appending_goes_on(config, history, data):
    with a_log(config, history) as (log, model):
        if data.draw(st.booleans()):
            flush(log)
        offset = data.draw(st.integers(0, log.end_offset))
        log.truncate_to(offset, NOW_MS)
        ends = [base for base, _ in model[1:]] + [sum(count for count, _, _ in history)]
        kept = [item for item, end in zip(model, ends, strict=True) if end <= offset]
        assert [(h.base_offset, batch) for h, batch in read_batches(log)] == kept
        assert append(log, b"more").base_offset == log.end_offset - 1
        assert len(read_batches(log)) == len(kept) + 1


@settings(max_examples=40, deadline=None)
@given(configs, histories, st.data())
def test_damage_above_the_recovery_point_is_cut_and_nothing_else(config, history, data):
    """Flip a byte anywhere above the recovery point: what comes before the damage is all there."""
    with a_log(config, history) as (log, model):
        places = [(s, position, header) for s in log.segments for position, header in _scan(s)]
        hit = data.draw(st.integers(0, len(places) - 1))
        segment, position, header = places[hit]
        recovery_point = data.draw(st.sampled_from([h.base_offset for _, _, h in places[: hit + 1]]))
        # The leader epoch and the base offset are not covered by the checksum; flips there are tested apart.
        at = data.draw(st.integers(position + 16, position + header.size - 1))
        copy = log.directory.parent / "copy-0"
        shutil.copytree(log.directory, copy)
        _flip(copy / segment.path.name, at, data.draw(st.integers(1, 255)))
        recovered = open_log(copy, config, recovery_point=recovery_point, files=FilePool())
        assert [(h.base_offset, batch) for h, batch in read_batches(recovered)] == model[:hit]
        assert recovered.end_offset == header.base_offset
        again = append(recovered, b"on we go")
        assert again.base_offset == header.base_offset
        assert read_batches(recovered, again.base_offset)
        recovered.abandon()


@settings(max_examples=30, deadline=None)
@given(configs, histories, st.data())
def test_a_file_cut_anywhere_holds_the_whole_batches_before_the_cut(config, history, data):
    with a_log(config, history) as (log, model):
        segment = log.segments[-1]
        size = data.draw(st.integers(0, segment.size))
        copy = log.directory.parent / "copy-0"
        shutil.copytree(log.directory, copy)
        with open(copy / segment.path.name, "r+b") as file:
            file.truncate(size)
        recovered = open_log(copy, config)
        whole = [h.base_offset for position, h in _scan(segment) if position + h.size <= size]
        older = [base for base, _ in model if base < segment.base_offset]
        assert [h.base_offset for h, _ in read_batches(recovered)] == older + whole
        append(recovered, b"on we go")
        assert len(read_batches(recovered)) == len(older) + len(whole) + 1
        recovered.abandon()


@settings(max_examples=30, deadline=None)
@given(histories, st.integers(0, 7), st.integers(1, 255), st.data())
def test_a_wrong_base_offset_never_moves_the_log_back(history, byte, flip, data):
    """The checksum does not cover it, so it must at least go on from what came before."""
    with a_log(LogConfig(), history) as (log, model):
        hit = data.draw(st.integers(0, len(model) - 1))
        position = sum(len(batch) for _, batch in model[:hit])
        copy = log.directory.parent / "copy-0"
        shutil.copytree(log.directory, copy)
        _flip(copy / log.segments[0].path.name, position + byte, flip)
        recovered = open_log(copy)
        bases = [h.base_offset for h, _ in read_batches(recovered)]
        assert bases == sorted(set(bases))
        assert bases[:hit] == [base for base, _ in model[:hit]]
        recovered.abandon()


retained = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=25)


@fast
@given(retained, st.integers(-1, 2500), st.integers(-1, 22), st.integers(0, 25), st.integers(0, 25))
def test_retention_is_what_the_model_says(batches_made, retention_bytes, retention_days, start, below):
    day = 86_400_000
    config = LogConfig(
        segment_bytes=600,
        retention_bytes=retention_bytes,
        retention_ms=retention_days * day if retention_days >= 0 else -1,
    )
    with a_log(config, [(1, size, -age * day) for age, size in batches_made]) as (log, model):
        log.delete_records_before(min(start, log.end_offset))
        below = min(below, log.end_offset)
        ages = [age for age, _ in batches_made]
        total = log.size_bytes
        expected, kept_from = [], log.segments[0].base_offset
        for segment in log.segments:
            end = log.end_offset if segment.next_base is None else segment.next_base
            passed = end <= log.start_offset and segment.next_base is not None
            surplus = retention_bytes >= 0 and total - segment.size >= retention_bytes
            old = retention_days >= 0 and min(ages[segment.base_offset : end]) > retention_days
            if end > below or not (passed or surplus or old):
                break
            expected.append(segment)
            kept_from = end
            total -= segment.size
        assert log.expired_segments(NOW_MS, below=below) == expected
        log.remove_segments(expected, NOW_MS, end_offset=log.end_offset)
        assert log.start_offset == max(kept_from, min(start, log.end_offset))
        assert [h.base_offset for h, _ in read_batches(log)] == [b for b, _ in model if b >= log.start_offset]


def _scan(segment):
    with open(segment.path, "rb") as file:
        return list(iter_batch_headers(file.fileno(), 0, segment.size))


def _flip(path: Path, at: int, bits: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (before,) = struct.unpack("B", file.read(1))
        file.seek(at)
        file.write(bytes([before ^ bits]))
