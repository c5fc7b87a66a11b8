"""Threads read while the log is appended to, rolled, compacted, retained and flushed."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.unit.log.helpers import NOW_MS, open_files, open_log

from penstock.log.compaction.cleaner import CleanableLog, LogCleaner
from penstock.log.config import LogConfig
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, checksum, decode_records, encode_batch, iter_batches

SECONDS_MIN = 1.0
SECONDS_MAX = 30.0
KEYS = 40
CONFIG = LogConfig(
    segment_bytes=4000,
    index_interval_bytes=200,
    cleanup_compact=True,
    cleanup_delete=True,
    retention_bytes=20_000,
    min_cleanable_dirty_ratio=0.0,
    file_delete_delay_ms=0,
)


class World:
    """One log, what its writer knows of it, and when to stop."""

    def __init__(self, directory):
        self.log = open_log(directory / "t-0", CONFIG, files=FilePool(descriptors_max=4, index_bytes_max=400))
        self.cleaner = LogCleaner(directory, dedupe_buffer_bytes=1 << 16)
        self.high = self.log.end
        self.stop = threading.Event()
        self.reads = self.passes = 0

    @property
    def has_seen_enough(self):
        return self.reads > 100 and self.passes > 3 and self.log.start_offset > 0

    def run(self, chore):
        try:
            while not self.stop.is_set():
                chore()
        finally:
            self.stop.set()

    # The loop's part: one thread appends, removes and begins flushes, as the node does.

    def append_and_retain(self):
        log = self.log
        for _ in range(20):
            offset = log.end_offset
            records = [
                Record(n, NOW_MS + offset + n, b"%d" % random.randrange(KEYS), b"%d" % (offset + n))
                for n in range(3)
            ]
            log.append(memoryview(encode_batch(records)), leader_epoch=0, now_ms=NOW_MS)
        flush_job = log.flush_begin()
        if flush_job is not None:
            flush_job.run()
            log.flush_done(flush_job)
        self.high = log.end
        if not self.cleaner.busy or random.random() < 0.2:
            gone = log.expired_segments(NOW_MS, self.high.offset)
            for path in log.remove_segments(gone, NOW_MS, end_offset=log.end_offset):
                path.unlink(missing_ok=True)
        time.sleep(0.0005)

    def clean(self):
        logs = {("t", 0): CleanableLog(self.log, self.high.offset, self.high.offset)}
        report = self.cleaner.clean_filthiest_log(logs, now_ms=NOW_MS)
        if report is None:
            time.sleep(0.001)
            return
        self.passes += report.error is None
        for path in report.unlink:
            path.unlink(missing_ok=True)
        assert self.cleaner.uncleanable == {}

    def read(self):
        """A consumer: offsets only ever ascend, every batch is whole, every value is where it was written."""
        start = self.log.start_offset  # first: it never passes the high watermark that is read after it
        upto = self.high
        offset = random.randint(start, upto.offset)
        while offset < upto.offset:
            piece = self.read_piece(offset, random.choice((1, 500, 1 << 16)), upto)
            if piece is None:
                return
            last = offset - 1
            for header, batch in iter_batches(piece.data):
                assert checksum(batch) == header.crc
                assert last < header.last_offset < upto.offset
                last = header.last_offset
                for record in decode_records(batch, 1 << 20):
                    assert record.value == b"%d" % record.offset
            assert piece.data == b"" or piece.next_offset > last >= offset
            if not piece.data:
                self.check_nothing_left(offset, upto)
                return
            offset = piece.next_offset
            self.reads += 1

    def read_piece(self, offset, max_bytes, upto):
        """None where retention has removed the offset meanwhile."""
        try:
            return self.log.read(offset, max_bytes, upto)
        except ApiError as error:
            if error.code is ErrorCode.offset_out_of_range and offset < self.log.start_offset:
                return None
            raise

    def check_nothing_left(self, offset, upto):
        """An empty read below `upto` is right only after a compaction with a later high watermark."""
        assert self.log.active_segment.base_offset > upto.segment_base, (
            "the active segment is never compacted"
        )
        later = self.read_piece(offset, 1 << 16, self.high)
        if later is not None:
            assert all(header.last_offset >= upto.offset for header, _ in iter_batches(later.data))

    def look_up(self):
        start, high = self.log.start_offset, self.high
        asked = NOW_MS + random.randint(start, high.offset)
        found = self.log.offset_for_timestamp(asked)
        if found is not None:
            assert found.timestamp == NOW_MS + found.offset
            assert found.timestamp >= asked
        largest = self.log.offset_of_max_timestamp()
        assert largest is not None
        assert largest.offset >= high.offset - 1


def test_readers_see_whole_batches_whatever_happens_to_the_files(tmp_path):
    world = World(tmp_path)
    world.append_and_retain()
    chores = [world.append_and_retain, world.clean, world.read, world.read, world.look_up]
    with ThreadPoolExecutor(len(chores)) as pool:
        running = [pool.submit(world.run, chore) for chore in chores]
        world.stop.wait(SECONDS_MIN)
        give_up = time.monotonic() + SECONDS_MAX
        while not (world.has_seen_enough or world.stop.wait(0.05)) and time.monotonic() < give_up:
            pass
        world.stop.set()
        for each in running:
            each.result()
    assert world.has_seen_enough
    held = open_files(tmp_path)
    assert len(held) <= 4 + 1 + world.log.rolled_unsynced, held
    assert not [name for name in held if ".deleted" in name or "(deleted)" in name]
    expected = dict(_records(world.log))
    world.log.abandon()
    assert dict(_records(open_log(tmp_path / "t-0", CONFIG, start_offset=world.log.start_offset))) == expected


def _records(log):
    offset = log.start_offset
    while offset < log.end_offset:
        piece = log.read(offset, 1 << 20, log.end)
        for _, batch in iter_batches(piece.data):
            for record in decode_records(batch, 1 << 20):
                yield record.offset, (record.key, record.value)
        offset = piece.next_offset
