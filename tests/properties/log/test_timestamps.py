"""Offsets by timestamp compared with a scan."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.log.helpers import open_log
from tests.unit.log.test_timestamps import CONFIG, append_at


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), max_size=25),
    st.integers(0, 60),
    st.booleans(),
)
def test_timestamps_in_any_order_are_found_as_a_scan_finds_them(batches, start, reopen):
    with TemporaryDirectory() as folder:
        log = open_log(Path(folder) / "t-0", CONFIG)
        for timestamps in batches:
            append_at(log, *timestamps)
        log.delete_records_before(min(start, log.end_offset))
        start = log.start_offset
        if reopen:
            log.close()
            log = open_log(Path(folder) / "t-0", CONFIG, clean=True, start_offset=start)
        records = [(ts, offset, 0) for offset, ts in enumerate(chain(*batches)) if offset >= start]
        for asked in range(32):
            assert log.offset_for_timestamp(asked) == next((r for r in records if r[0] >= asked), None)
        assert log.offset_of_max_timestamp() == max(records, key=lambda r: (r[0], -r[1]), default=None)
        log.abandon()
