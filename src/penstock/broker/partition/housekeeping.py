"""What a node does in its own time: retention, compaction, periodic syncs, checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.broker.partition import Role
from penstock.cluster.delta import ImageDelta, TopicPartition
from penstock.log.space import NO_SPACE
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.log.cleaner import Cleaner

logger = logging.getLogger("penstock.housekeeping")

_FLUSH_CHECK_MS = 100
_REFUSED_CHECK_MS = 5_000
#: How far the note of the last sync may fall behind it in a power cut.
_SYNC_NOTES_MS = 1_000
#: However often a setting asks for a chore, requests come first.
_REST_MS_MIN = 10
_BACKOFF = "log.cleaner.backoff.ms"
_CLEANER_THREADS = "log.cleaner.threads"
_CLEANER_BUFFER = "log.cleaner.dedupe.buffer.size"


class IdleClock:
    """The wall clock, but never faster than time passes.

    Producers are remembered by the wall clock. When somebody sets it forward, all of them would seem to have been
    idle for long, and what they repeat would be taken for new; this way they are forgotten too late, at worst.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._looked_ms, self._now_ms = monotonic_ms(), wall_ms()

    def now_ms(self) -> int:
        before_ms, self._looked_ms = self._looked_ms, self._monotonic_ms()
        self._now_ms = min(self._now_ms + self._looked_ms - before_ms, self._wall_ms())
        return self._now_ms


class Housekeeping:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._cleaner: Cleaner | None = None
        self._stopping = False
        self._flush_due_ms: dict[Partition, int] = {}
        self._saved_high_watermarks: dict[tuple[str, int], int] = {}
        self._settings_changed = asyncio.Event()
        self._idle_clock = IdleClock(node.now_ms, lambda: time.monotonic_ns() // 1_000_000)

    def start(self) -> None:
        settings = self._node.settings
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
        self._repeat("sync notes", _SYNC_NOTES_MS, self._sync_notes)
        self._repeat("refused", _REFUSED_CHECK_MS, self._try_refused)
        if settings.boolean("log.cleaner.enable"):
            self._node.dynamic.watch((_BACKOFF, _CLEANER_THREADS, _CLEANER_BUFFER), self._configure_cleaner)
            self._repeat("cleaner", lambda: self._node.dynamic.integer(_BACKOFF), self._clean)

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
                    await asyncio.sleep(max(interval_ms, _REST_MS_MIN) / 1000)
                recoveries = self._node.store.space.recoveries
                try:
                    await chore()
                except OSError as error:
                    self._failed(name, error, recoveries)
                except Exception:
                    # One failed round is reported and the next one tried: a full disk passes.
                    logger.exception("housekeeping failed", extra={"chore": name})

        self._node.spawn(forever())

    async def _rest(self, interval_ms: Callable[[], int]) -> None:
        """As long as it takes by the setting's value at its end: a change counts at once."""
        began = time.monotonic()
        while (left_s := began + max(interval_ms(), _REST_MS_MIN) / 1000 - time.monotonic()) > 0:
            self._settings_changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._settings_changed.wait()

    def _configure_cleaner(self) -> None:
        if self._cleaner is not None:
            self._cleaner.dedupe_buffer_bytes = self._dedupe_buffer_bytes
        self._settings_changed.set()

    def _failed(self, chore: str, error: OSError, recoveries: int) -> None:
        """That the disk is full is said once, by whoever finds it so first."""
        if error.errno in NO_SPACE:
            self._node.store.space.ran_out(error, recoveries)
        else:
            logger.error("housekeeping failed", extra={"chore": chore, "reason": str(error)})

    def truncated(self, partition: Partition) -> None:
        """A follower's log was cut back to what its leader has: what compaction knows of it does not hold."""
        partition.truncated()
        if partition.is_compacted:
            key, offset = partition.key, partition.log.end_offset
            self._node.in_thread(self._the_cleaner().truncated, key, offset)

    async def _retain(self) -> None:
        for partition in self._node.partitions:
            try:
                await self.apply_retention(partition)
            except (ApiError, OSError) as error:
                # One log that cannot be worked on must not keep the others from being cut.
                level = logging.DEBUG if self._node.store.space.is_full else logging.WARNING
                logger.log(
                    level, "retention failed", extra={"partition": str(partition), "reason": str(error)}
                )

    async def apply_retention(self, partition: Partition) -> None:
        log, now_ms, end_offset = partition.log, self._node.now_ms(), partition.log.end_offset
        below = partition.high_watermark
        if self._node.may_hold_records(partition):
            below = min(below, await self._node.schedule.retained_from(partition))
        expired = await self._node.in_thread(log.expired_segments, now_ms, below)
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
        save_start = partial(self._node.store.save_start, *partition.key, log.start_offset)
        # Readers that come too late for a file look again; on a full disk that is the lesser evil.
        delay_ms = 0 if self._node.store.space.is_full else log.config.file_delete_delay_ms
        self.unlink_later(files, delay_ms, save_start)
        partition.flush()
        partition.start_moved()

    async def _taken_over(self, partition: Partition) -> int:
        """Below this offset nothing is held back that the schedule has not taken over."""
        if not self._node.may_hold_records(partition):
            return 0
        return await self._node.schedule.taken_over(partition)

    def _is_being_worked_on(self, partition: Partition) -> bool:
        """Compacted, or cut back in a thread."""
        is_cleaned = self._cleaner is not None and partition.key in self._cleaner.busy
        return is_cleaned or self._is_being_cut(partition)

    def _is_being_cut(self, partition: Partition) -> bool:
        return partition.role is Role.FOLLOWER and self._node.fetchers.is_rearranging(partition)

    def unlink_later(self, files: list[Path], delay_ms: int, first: Callable[[], None] | None = None) -> None:
        """Reads under way may still use them; what a stop leaves behind goes at the next start."""

        async def unlink() -> None:
            await asyncio.sleep(delay_ms / 1000)
            recoveries = self._node.store.space.recoveries
            try:
                if first is not None:
                    await self._node.in_thread(first)
                await self._node.in_thread(_unlink, files)
            except OSError as error:
                self._failed("unlink", error, recoveries)

        if files:
            self._node.spawn(unlink())

    async def _checkpoint(self) -> None:
        for partition in self._node.partitions:
            if partition.log.rolled_unsynced:
                partition.flush()
        await self._node.in_thread(self._node.store.checkpoint)

    async def _sync_notes(self) -> None:
        if self._node.store.has_unsynced_notes:
            await self._node.in_thread(self._node.store.sync_notes)

    async def _save_high_watermarks(self) -> None:
        """So that a replica that starts again knows what was committed without asking anyone."""
        now = self._node.partitions.high_watermarks()
        if now != self._saved_high_watermarks:
            await self._node.in_thread(self._node.store.save_high_watermarks, now)
            self._saved_high_watermarks = now

    async def _try_refused(self) -> None:
        """Partitions that the disk had no room for when they were created, and losses nobody has heard of yet."""
        node = self._node
        if len(node.partitions.lost):
            await node.partitions.lost.report()
        if node.store.space.is_full:
            await self._retain()
            node.store.space.look()
        if not node.partitions.refused:
            return
        async with node.metadata.turn:
            made = await node.partitions.try_again(node.image)
            node.image_changed(ImageDelta(partitions_changed=tuple(TopicPartition(*key) for key in made)))

    async def _expire(self) -> None:
        now_ms = self._idle_clock.now_ms()
        for partition in self._node.partitions:
            if not self._is_being_cut(partition):
                partition.log.producers.expire(now_ms)

    async def _flush_by_interval(self) -> None:
        now_ms = self._node.now_ms()
        before, self._flush_due_ms = self._flush_due_ms, {}
        for partition in self._node.partitions:
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
        """One thread is left for reads, which must not wait until a log is cleaned."""
        threads = self._node.settings.integer("penstock.io.threads")
        return max(1, min(self._node.dynamic.integer(_CLEANER_THREADS), threads - 1))

    @property
    def _dedupe_buffer_bytes(self) -> int:
        return self._node.dynamic.integer(_CLEANER_BUFFER) // self._cleaners

    async def _clean(self) -> None:
        await asyncio.gather(*(self._clean_while_dirty() for _ in range(self._cleaners)))

    async def _clean_while_dirty(self) -> None:
        """Clean one log after the other while any is worth it: leaders' and followers', below what is committed."""
        from penstock.log.cleaner import Cleanable

        cleaner = self._the_cleaner()
        while not self._stopping:
            taken = {p: await self._taken_over(p) for p in self._node.partitions if p.is_compacted}
            logs = {
                (p.topic, p.index): Cleanable(p.log, p.last_stable.offset, p.high_watermark, taken[p])
                for p in self._node.partitions
                if p in taken and not self._is_being_cut(p)
            }
            report = await self._node.in_thread(
                cleaner.clean_filthiest,
                logs,
                now_ms=self._node.now_ms(),
                is_cancelled=lambda: self._stopping,
            )
            if report is None:
                return
            cleaned = logs[report.partition].log
            self.unlink_later(list(report.unlink), cleaned.config.file_delete_delay_ms)
            if report.error is not None:
                return  # a full disk, for one, is no better at once

    def _the_cleaner(self) -> Cleaner:
        from penstock.log.cleaner import Cleaner

        if self._cleaner is None:
            self._cleaner = Cleaner(self._node.store.directory, dedupe_buffer_bytes=self._dedupe_buffer_bytes)
        return self._cleaner


def _unlink(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
