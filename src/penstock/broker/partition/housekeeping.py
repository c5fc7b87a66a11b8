"""Periodic work on the logs of a node: retention, compaction, flushes by interval, checkpoints, producer id expiry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.broker.environment import ImageView
from penstock.broker.partition.partition import ReplicaRole
from penstock.cluster.image import ImageDelta, TopicPartition
from penstock.log.disk_space import NO_SPACE_ERRNOS
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, Lazy
    from penstock.broker.partition.partition import Partition
    from penstock.broker.partition.replica_manager import Fetchers, ReplicaManager
    from penstock.log.compaction.cleaner import LogCleaner
    from penstock.log.log_manager import LogManager

logger = logging.getLogger("penstock.housekeeping")

_FLUSH_CHECK_MS = 100
_REFUSED_CHECK_MS = 5_000
_UNLINK_RETRY_S = 0.5
#: After a power loss the stored synced offsets are at most this much older than the last sync.
_SYNCED_OFFSETS_MS = 1_000
#: Lower bound of all intervals, so that no setting lets housekeeping starve requests.
_INTERVAL_MS_MIN = 10
_CLEANER_BACKOFF = "log.cleaner.backoff.ms"
_CLEANER_THREADS = "log.cleaner.threads"
_CLEANER_BUFFER = "log.cleaner.dedupe.buffer.size"


class ProducerExpiryClock:
    """The wall clock, but never faster than the monotonic clock.

    Producer ids expire by the wall clock. If it were set forward, all producers would seem to have been idle for long,
    and the log would accept their retries as new batches. With this clock they expire too late, at worst.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._looked_ms, self._now_ms = monotonic_ms(), wall_ms()

    def now_ms(self) -> int:
        before_ms, self._looked_ms = self._looked_ms, self._monotonic_ms()
        self._now_ms = min(self._now_ms + self._looked_ms - before_ms, self._wall_ms())
        return self._now_ms


class Metadata(ImageView, Protocol):
    @property
    def turn(self) -> asyncio.Lock:
        """Lock for changing the image and for applying it to this node."""


class Schedule(Protocol):
    """What the schedule knows of held records; `coordinators.schedule.coordinator.ScheduleCoordinator` documents it."""

    def has_active_mover(self, partition: Partition) -> bool: ...
    async def retention_limit(self, partition: Partition) -> int: ...
    async def known_moved_offset(self, partition: Partition) -> int: ...


class Housekeeping:
    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        *,
        dynamic: DynamicSettings,
        metadata: Metadata,
        partitions: ReplicaManager,
        fetchers: Callable[[], Fetchers],
        schedule: Lazy[Schedule],
        image_changed: Callable[[ImageDelta], None],
    ) -> None:
        """`fetchers` is called only if this node follows a partition.

        `image_changed` is called when partitions are open that the disk had refused before.
        """
        self._environment = environment
        self._settings = settings
        self._store = store
        self._dynamic = dynamic
        self._metadata = metadata
        self._partitions = partitions
        self._fetchers = fetchers
        self._schedule = schedule
        self._image_changed = image_changed
        self._cleaner: LogCleaner | None = None
        self._stopping = False
        self._flush_due_ms: dict[Partition, int] = {}
        self._unlinking: Counter[Partition] = Counter()
        self._saved_high_watermarks: dict[tuple[str, int], int] = {}
        self._settings_changed = asyncio.Event()
        self._idle_clock = ProducerExpiryClock(environment.now_ms, lambda: time.monotonic_ns() // 1_000_000)

    def start(self) -> None:
        settings = self._settings
        self._repeat("retention", settings.integer("log.retention.check.interval.ms"), self._retain)
        self._repeat(
            "checkpoint", settings.integer("log.flush.offset.checkpoint.interval.ms"), self._checkpoint
        )
        self._repeat(
            "high watermarks",
            settings.integer("replica.high.watermark.checkpoint.interval.ms"),
            self._save_high_watermarks,
        )
        self._repeat("producers", settings.integer("producer.id.expiration.check.interval.ms"), self._expire)
        self._repeat("flush", _FLUSH_CHECK_MS, self._flush_by_interval)
        self._repeat("sync notes", _SYNCED_OFFSETS_MS, self._sync_notes)
        self._repeat("refused", _REFUSED_CHECK_MS, self._try_refused)
        if settings.boolean("log.cleaner.enable"):
            self._dynamic.watch(
                (_CLEANER_BACKOFF, _CLEANER_THREADS, _CLEANER_BUFFER), self._configure_cleaner
            )
            self._repeat("cleaner", lambda: self._dynamic.integer(_CLEANER_BACKOFF), self._clean)

    def stop(self) -> None:
        self._stopping = True

    def _repeat(
        self, name: str, interval_ms: int | Callable[[], int], chore: Callable[[], Awaitable[None]]
    ) -> None:
        async def forever() -> None:
            while True:
                if callable(interval_ms):
                    await self._rest(interval_ms)
                else:
                    await asyncio.sleep(max(interval_ms, _INTERVAL_MS_MIN) / 1000)
                recoveries = self._store.space.recoveries
                try:
                    await chore()
                except OSError as error:
                    self._failed(name, error, recoveries)
                except Exception:
                    # Report the failure and try again in the next round.
                    logger.exception("housekeeping failed", extra={"chore": name})

        self._environment.spawn(forever())

    async def _rest(self, interval_ms: Callable[[], int]) -> None:
        """Sleep for the interval. A change of its setting takes effect at once."""
        began = time.monotonic()
        while (left_s := began + max(interval_ms(), _INTERVAL_MS_MIN) / 1000 - time.monotonic()) > 0:
            self._settings_changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._settings_changed.wait()

    def _configure_cleaner(self) -> None:
        if self._cleaner is not None:
            self._cleaner.dedupe_buffer_bytes = self._dedupe_buffer_bytes
        self._settings_changed.set()

    def _failed(self, chore: str, error: OSError, recoveries: int) -> None:
        """Report a failed chore. A full disk is reported only once, by the first operation that fails."""
        if error.errno in NO_SPACE_ERRNOS:
            self._store.space.ran_out(error, recoveries)
        else:
            logger.error("housekeeping failed", extra={"chore": chore, "reason": str(error)})

    def truncated(self, partition: Partition) -> None:
        """Reset the state of a follower's partition after a truncation, including what the cleaner knows of its log."""
        partition.truncated()
        if partition.is_compacted:
            key, offset = partition.key, partition.log.end_offset
            self._environment.in_thread(self._get_cleaner().truncated, key, offset)

    async def _retain(self) -> None:
        now_ms = self._environment.now_ms()
        committed = [(partition, partition.high_watermark) for partition in self._partitions]
        # One call looks at all logs, because most have nothing to delete.
        for partition in await self._environment.in_thread(_with_expired_segments, committed, now_ms):
            try:
                await self.apply_retention(partition)
            except (ApiError, OSError) as error:
                # A log that fails must not keep retention from the others.
                level = logging.DEBUG if self._store.space.is_full else logging.WARNING
                logger.log(
                    level, "retention failed", extra={"partition": str(partition), "reason": str(error)}
                )

    async def apply_retention(self, partition: Partition) -> None:
        log, now_ms, end_offset = partition.log, self._environment.now_ms(), partition.log.end_offset
        below = partition.high_watermark
        if self.may_hold_scheduled_records(partition):
            below = min(below, await self._schedule().retention_limit(partition))
        expired = await self._environment.in_thread(log.expired_segments, now_ms, below)
        if not expired or partition.is_retired or self._is_being_worked_on(partition):
            return
        files = log.remove_segments(expired, now_ms, end_offset=end_offset)
        logger.info(
            "retention",
            extra={
                "partition": f"{partition.topic}-{partition.index}",
                "segments": len(expired),
                "start_offset": log.start_offset,
            },
        )
        checkpoint_start_offset = partial(
            self._store.checkpoint_start_offset, *partition.key, log.start_offset
        )
        # On a full disk delete at once: a reader whose file is gone must look it up again, but space is more urgent.
        delay_ms = 0 if self._store.space.is_full else log.config.file_delete_delay_ms
        self.unlink_later(files, delay_ms, partition, checkpoint_start_offset)
        partition.flush()
        partition.start_moved()

    def may_hold_scheduled_records(self, partition: Partition) -> bool:
        """Whether a partition's log may contain records that are held back until they are due."""
        if partition.is_scheduled:
            return True
        schedule = self._schedule.existing
        return schedule is not None and schedule.has_active_mover(partition)

    async def _taken_over(self, partition: Partition) -> int:
        """Return the offset below which the schedule has taken over all held records."""
        if not self.may_hold_scheduled_records(partition):
            return 0
        return await self._schedule().known_moved_offset(partition)

    def _is_being_worked_on(self, partition: Partition) -> bool:
        """Whether a thread is compacting or truncating the log."""
        is_cleaned = self._cleaner is not None and partition.key in self._cleaner.busy
        return is_cleaned or self._is_being_cut(partition)

    def _is_being_cut(self, partition: Partition) -> bool:
        return partition.role is ReplicaRole.FOLLOWER and self._fetchers().is_truncating(partition)

    def unlink_later(
        self, files: list[Path], delay_ms: int, partition: Partition, first: Callable[[], None] | None = None
    ) -> None:
        """Delete files of a partition after a delay, because reads in progress may still use them.

        `first` is called before segments are deleted. Files that remain when the node stops are deleted at its next
        start.
        """

        async def unlink() -> None:
            await asyncio.sleep(delay_ms / 1000)
            while True:
                if await self._unlinked(files, first):
                    return
                await asyncio.sleep(_UNLINK_RETRY_S)

        def unlinked(_: asyncio.Task[None]) -> None:
            self._unlinking[partition] -= 1
            if not self._unlinking[partition]:
                del self._unlinking[partition]

        if files:
            self._unlinking[partition] += 1
            self._environment.spawn(unlink()).add_done_callback(unlinked)

    def is_unlinking(self, partition: Partition) -> bool:
        """Whether files of the partition are about to be deleted."""
        return self._unlinking[partition] > 0

    async def _unlinked(self, files: list[Path], first: Callable[[], None] | None) -> bool:
        """Return False if the disk has no room for what has to be written first."""
        recoveries = self._store.space.recoveries
        try:
            if first is not None:
                if self._store.space.is_full:
                    # The reserve may be used up. These indexes are not needed any more, and make room for a checkpoint.
                    await self._environment.in_thread(
                        _unlink, [path for path in files if ".log" not in path.name]
                    )
                await self._environment.in_thread(first)
            await self._environment.in_thread(_unlink, files)
        except OSError as error:
            self._failed("unlink", error, recoveries)
            return error.errno not in NO_SPACE_ERRNOS
        return True

    async def _checkpoint(self) -> None:
        for partition in self._partitions:
            if partition.log.rolled_unsynced:
                partition.flush()
        await self._environment.in_thread(self._store.checkpoint)

    async def _sync_notes(self) -> None:
        if self._store.synced_offsets_changed:
            await self._environment.in_thread(self._store.sync_synced_offsets)

    async def _save_high_watermarks(self) -> None:
        """Save the high watermarks, so that a replica knows after a restart what was committed."""
        now = self._partitions.high_watermarks()
        if now != self._saved_high_watermarks:
            await self._environment.in_thread(self._store.save_high_watermarks, now)
            self._saved_high_watermarks = now

    async def _try_refused(self) -> None:
        """Retry partitions that the disk refused to create or to lead, and report losses not yet reported."""
        partitions, space = self._partitions, self._store.space
        if len(partitions.lost):
            await partitions.lost.report()
        if space.is_full:
            await self._retain()
            space.look()
        if not partitions.refused and not partitions.not_led:
            return
        async with self._metadata.turn:
            image = self._metadata.image
            served = [*await partitions.retry_leading(image), *await partitions.retry_refused(image)]
            self._image_changed(ImageDelta(partitions_changed=tuple(TopicPartition(*key) for key in served)))

    async def _expire(self) -> None:
        now_ms = self._idle_clock.now_ms()
        for partition in self._partitions:
            if not self._is_being_cut(partition):
                partition.log.producers.expire(now_ms)

    async def _flush_by_interval(self) -> None:
        now_ms = self._environment.now_ms()
        before, self._flush_due_ms = self._flush_due_ms, {}
        for partition in self._partitions:
            config = partition.log.config
            if config.flush != "interval" or not partition.log.needs_flush:
                continue
            due_ms = before.get(partition, now_ms + config.flush_interval_ms)
            if now_ms >= due_ms:
                partition.flush()
            else:
                self._flush_due_ms[partition] = due_ms

    @property
    def _cleaners(self) -> int:
        """Number of logs to clean at once: one I/O thread stays free for reads, which must not wait for the cleaner."""
        threads = self._settings.integer("penstock.io.threads")
        return max(1, min(self._dynamic.integer(_CLEANER_THREADS), threads - 1))

    @property
    def _dedupe_buffer_bytes(self) -> int:
        return self._dynamic.integer(_CLEANER_BUFFER) // self._cleaners

    async def _clean(self) -> None:
        await asyncio.gather(*(self._clean_while_dirty() for _ in range(self._cleaners)))

    async def _clean_while_dirty(self) -> None:
        """Clean one log after the other while any is dirty enough, of leaders and followers; only committed records."""
        from penstock.log.compaction.cleaner import CleanableLog

        cleaner = self._get_cleaner()
        while not self._stopping:
            taken = {p: await self._taken_over(p) for p in self._partitions if p.is_compacted}
            logs = {
                (p.topic, p.index): CleanableLog(p.log, p.last_stable.offset, p.high_watermark, taken[p])
                for p in self._partitions
                if p in taken and not self._is_being_cut(p)
            }
            report = await self._environment.in_thread(
                cleaner.clean_filthiest_log,
                logs,
                now_ms=self._environment.now_ms(),
                is_cancelled=lambda: self._stopping,
            )
            if report is None:
                return
            cleaned = logs[report.partition].log
            delay_ms = cleaned.config.file_delete_delay_ms
            if (partition := self._partitions.get(*report.partition)) is not None:
                self.unlink_later(list(report.unlink), delay_ms, partition)
                if report.damage is not None and partition.log is cleaned:
                    self._partitions.handle_read_error(partition, report.damage)
            if report.error is not None:
                return  # an immediate retry would not help, for instance on a full disk

    def _get_cleaner(self) -> LogCleaner:
        from penstock.log.compaction.cleaner import LogCleaner

        if self._cleaner is None:
            self._cleaner = LogCleaner(self._store.directory, dedupe_buffer_bytes=self._dedupe_buffer_bytes)
        return self._cleaner


def _with_expired_segments(committed: list[tuple[Partition, int]], now_ms: int) -> list[Partition]:
    """Return the partitions that have expired segments, or whose log fails."""
    found = []
    for partition, high_watermark in committed:
        try:
            is_affected = bool(partition.log.expired_segments(now_ms, high_watermark))
        except (ApiError, OSError):
            is_affected = True
        if is_affected:
            found.append(partition)
    return found


def _unlink(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
