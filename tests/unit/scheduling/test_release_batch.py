"""Which records are released together: the first ones that fit, in any reading order."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.release_batch import RECORD_OVERHEAD_BYTES, DueRecords, gather_due_records
from penstock.scheduling.schedule_log import (
    DueEntry,
    HeldRecord,
    StoredBlock,
    open_block,
    pack_block,
    unpack_due,
)

sizes = st.integers(0, 300)
groups_of = st.dictionaries(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, 50), sizes), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)


def group(times_and_sizes: list[tuple[int, int]], floor_ms: int) -> StoredBlock:
    records = [HeldRecord(ms, b"%d" % ms + b"." * size, 0, b"") for ms, size in times_and_sizes]
    return StoredBlock(floor_ms, open_block(pack_block(records)))


@given(
    contents=groups_of,
    floor_ms=st.integers(-1, 40),
    bytes_max=st.integers(1, 3000),
    split_bytes=st.integers(1, 900),
)
def test_the_first_that_fit_are_gathered_and_split_in_order(
    contents: dict[int, list[tuple[int, int]]], floor_ms: int, bytes_max: int, split_bytes: int
) -> None:
    groups = {offset: group(records, floor_ms) for offset, records in contents.items()}
    dues = sorted(unpack_due(key) for offset, each in groups.items() for key in each.dues(offset))
    release = gather_due_records(dues, sorted(groups.items()), bytes_max)
    assert list(release.dues) == dues[: len(release.dues)]
    size = sum(record.size + RECORD_OVERHEAD_BYTES for record in release.records)
    assert size <= bytes_max or len(release.records) == 1
    for due, record in zip(release.dues, release.records, strict=True):
        assert record == groups[due.offset].block.record(
            due.record_index, groups[due.offset].block.starts()[due.record_index]
        )
        assert max(record.due_ms, floor_ms) == due.due_ms
    if len(release.dues) < len(dues):
        following = dues[len(release.dues)]
        left_out = groups[following.offset].block.record(
            following.record_index, groups[following.offset].block.start(following.record_index)
        )
        assert size + left_out.size + RECORD_OVERHEAD_BYTES > bytes_max, "no more would have fitted"
    _check_split(release, groups, split_bytes)


def _check_split(release: DueRecords, groups: dict[int, StoredBlock], split_bytes: int) -> None:
    parts: list[DueRecords] = []
    rest: DueRecords | None = release
    while rest is not None:
        part, rest = rest.split(split_bytes)
        parts.append(part)
    assert [due for part in parts for due in part.dues] == list(release.dues)
    assert [record for part in parts for record in part.records] == list(release.records)
    finished = [offset for part in parts for offset in part.finished]
    last: DueEntry = release.dues[-1]
    assert sorted(finished) == sorted(
        offset for offset, each in groups.items() if max(map(unpack_due, each.dues(offset))) <= last
    ), "each group ends once, with its last record"
