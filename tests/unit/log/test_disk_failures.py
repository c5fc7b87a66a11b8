"""The disk fails at any one step, or from there on: acknowledged records are there after the restart."""

from uuid import UUID

import pytest
from tests.unit.log.faulty_disk import FaultyDisk
from tests.unit.log.helpers import NOW_MS, read_batches

from penstock.log.compaction.cleaner import CleanableLog, LogCleaner
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.log_manager import LogManager
from penstock.protocol.errors import ApiError
from penstock.protocol.record_batch import Record, decode_records, encode_batch

CONFIG = LogConfig(
    segment_bytes=600,
    index_interval_bytes=100,
    cleanup_compact=True,
    cleanup_delete=True,
    retention_bytes=3000,
    min_cleanable_dirty_ratio=0.0,
)
TOPIC_ID = UUID(int=7)
#: Of each kind (a write, a sync, a rename, ...) the disk fails at so many steps, spread over the whole life.
STEPS_OF_A_KIND = 6


class World:
    """A life of a partition: what it acknowledged, and which of its records may have gone by now."""

    def __init__(self, directory):
        self.directory = directory
        self.acknowledged: dict[int, tuple[bytes, bytes]] = {}
        self.sequence = 0
        self.start_offset = 0
        self.store: LogManager | None = None

    def live(self):
        """Raises OSError where the process would end, or does not start."""
        self.store = LogManager.open(self.directory, node_id=1, threads=1)
        log = self.store.open_or_create("t", 0, TOPIC_ID, CONFIG, now_ms=NOW_MS)
        cleaner = LogCleaner(self.directory, dedupe_buffer_bytes=1 << 16)
        for _ in range(2):
            self.append(log, 12)
            self.flush(log)
            self.retain(log)
            self.clean(log, cleaner)
            self.delete_records(log)
        self.append(log, 3)
        store, self.store = self.store, None
        store.close()

    def append(self, log: Log, count: int) -> None:
        for _ in range(count):
            key, value = b"key-%d" % (self.sequence % 5), b"%d" % self.sequence * 20
            batch = encode_batch(
                [Record(0, NOW_MS, key, value)], producer_id=1, producer_epoch=0, base_sequence=self.sequence
            )
            try:
                offset = log.append(memoryview(batch), leader_epoch=0, now_ms=NOW_MS).base_offset
            except ApiError:
                continue
            self.acknowledged[offset] = key, value
            self.sequence += 1

    def flush(self, log: Log) -> None:
        flush_job = log.flush_begin()
        if flush_job is not None:
            flush_job.run()
            log.flush_done(flush_job)
        self._passes(self.store.checkpoint)

    def retain(self, log: Log) -> None:
        def remove():
            gone = log.expired_segments(NOW_MS)
            for path in log.remove_segments(gone, NOW_MS, end_offset=log.end_offset):
                path.unlink()

        self._passes(remove)
        self.start_offset = max(self.start_offset, log.start_offset)

    def clean(self, log: Log, cleaner: LogCleaner) -> None:
        report = cleaner.clean_filthiest_log(
            {("t", 0): CleanableLog(log, log.end_offset, log.end_offset)}, now_ms=NOW_MS
        )
        for path in report.unlink if report else ():
            path.unlink(missing_ok=True)

    def delete_records(self, log: Log) -> None:
        log.delete_records_before(min(log.start_offset + 1, log.end_offset))
        if self._passes(self.store.checkpoint):
            self.start_offset = max(self.start_offset, log.start_offset)

    @staticmethod
    def _passes(chore) -> bool:
        """Housekeeping reports what fails and tries again later."""
        try:
            chore()
        except (OSError, ApiError):
            return False
        return True

    def crash(self) -> None:
        if self.store is not None:
            self.store.close(clean=False)
            self.store = None

    def check(self) -> None:
        store = LogManager.open(self.directory, node_id=1, threads=1)
        log = store.open_or_create("t", 0, TOPIC_ID, CONFIG, now_ms=NOW_MS)
        found = {
            record.offset: (record.key, record.value)
            for _, batch in read_batches(log)
            for record in decode_records(batch, 1 << 20)
        }
        assert found.items() <= self.acknowledged.items()
        newest = {key: offset for offset, (key, _) in sorted(self.acknowledged.items())}
        assert {o for o in newest.values() if o >= max(log.start_offset, self.start_offset)} <= found.keys()
        assert log.end_offset == max(self.acknowledged, default=-1) + 1
        assert log.start_offset <= max(self.start_offset, *newest.values(), 0) + 1
        if self.sequence:
            self._check_producer(log)
        store.close()

    def _check_producer(self, log: Log) -> None:
        """A retry of the last batch is known for one, and the next one follows."""
        last = encode_batch(
            [Record(0, NOW_MS, b"k", b"v")], producer_id=1, producer_epoch=0, base_sequence=self.sequence - 1
        )
        assert log.append(memoryview(last), leader_epoch=0, now_ms=NOW_MS).duplicate
        before = log.end_offset
        self.append(log, 1)
        assert log.end_offset == before + 1


def life(directory, fail_at=None, *, lasting=False):
    disk, world = FaultyDisk(fail_at, lasting=lasting), World(directory)
    with pytest.MonkeyPatch.context() as patched:
        disk.install(patched)
        try:
            world.live()
        except OSError:
            assert disk.failed
        finally:
            world.crash()
        disk.mend()
        world.check()
    return disk


def test_a_life_without_faults(tmp_path):
    disk = life(tmp_path / "whole")
    assert disk.calls.total() > 100


@pytest.mark.parametrize("lasting", [False, True])
def test_what_was_acknowledged_survives_a_fault_at_any_step(tmp_path, lasting):
    for kind, count in sorted(life(tmp_path / "whole").calls.items()):
        for number in range(1, count + 1, count // STEPS_OF_A_KIND + 1):
            try:
                disk = life(tmp_path / f"{kind}-{number}", (kind, number), lasting=lasting)
                assert disk.failed[0] == kind
            except Exception as error:
                error.add_note(f"failed at {kind} number {number} of {count}")
                raise
