"""A schedule shard on the leader of its partition, for as long as this broker leads the partition in that epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from penstock.broker.coordinators.runtime.sharded_coordinator import leads_in_epoch
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.broker.coordinators.schedule.releaser import Releaser
from penstock.broker.coordinators.schedule.storage import BlockFile, DueIndex, load_groups, load_sources
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from penstock.scheduling.schedule_log import ScheduleSource, SourcePosition
from penstock.scheduling.schedule_shard import KeyValue, ScheduleShard

if TYPE_CHECKING:
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.partition.partition import Partition

logger = logging.getLogger("penstock.schedule")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ActiveScheduleShard:
    def __init__(self, schedule: ScheduleCoordinator, partition: Partition) -> None:
        self.schedule = schedule
        self.environment = schedule.environment
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.indexes = DueIndex(BlockFile(schedule.directory))
        self.shard = ScheduleShard(self.indexes)
        self.releaser = Releaser(self)
        self._knows_sources = self.is_loaded = False
        self._last_offset = -1
        self._task = self.environment.spawn(self._run())

    def __repr__(self) -> str:
        return f"<ActiveScheduleShard {self.partition.index} {self.shard!r}>"

    @property
    def is_current(self) -> bool:
        return leads_in_epoch(self.partition, self.leader_epoch)

    @property
    def knows_topics(self) -> bool:
        """Whether a topic that is not in the image was deleted, rather than being too new for the image."""
        return self.schedule.image_includes_epoch(self.partition.index, self.leader_epoch)

    def close(self) -> None:
        self._task.cancel()
        self.releaser.close()

    async def ask(self, ask: ScheduleRequest) -> SourcePosition | None:
        """Handle the request of a mover. Returns the source's position once it is committed. Raises ApiError."""
        self._check_ready(ask.what)
        if ask.source.topic_id not in self.schedule.metadata.image.topics_by_id:
            raise ApiError(ErrorCode.unknown_topic_id)
        match ask.what:
            case ScheduleOperation.REGISTER:
                self.append(self.shard.register(ask.source, ask.position))
            case ScheduleOperation.MOVE:
                await self._take(ask)
        # As it is now: while this waits, another mover of the source may move it further, which is not committed then.
        position = self.shard.position(ask.source)
        await self.committed()
        return position

    def _check_ready(self, what: ScheduleOperation) -> None:
        """Raises ApiError if not loaded. Positions are loaded first, so that producers need not wait for the rest."""
        if not self.is_loaded and not (what is ScheduleOperation.POSITION and self._knows_sources):
            raise ApiError(ErrorCode.coordinator_load_in_progress)
        if not self.is_current:
            raise ApiError(ErrorCode.not_coordinator)

    async def _take(self, ask: ScheduleRequest) -> None:
        expected = ask.position
        for chunk in ask.chunks:
            await self.releaser.gathered(ask.source)
            offset = self.partition.log.end_offset
            self.append(self.shard.take(ask.source, expected, chunk, offset), chunk.codec)
            expected = chunk.position
            await asyncio.sleep(0)
        self.releaser.wake()

    def append(self, records: Sequence[KeyValue], codec: Codec = Codec.NONE) -> None:
        """Append the records as one batch and replay them. Raises ApiError, and then nothing has changed."""
        if not records:
            return
        if not self.partition.has_enough_replicas:
            raise ApiError(ErrorCode.not_enough_replicas)
        now_ms, base_offset = self.environment.now_ms(), self.partition.log.end_offset
        batch = encode_batch(
            [Record(index, now_ms, key, value) for index, (key, value) in enumerate(records)], codec=codec
        )
        self._last_offset = self.partition.append_internal(batch, now_ms, leader_epoch=self.leader_epoch)
        assert self._last_offset == base_offset + len(records) - 1
        for index, (key, value) in enumerate(records):
            self.shard.replay(base_offset + index, key, value)

    async def committed(self) -> None:
        """Wait until everything appended so far is committed. Raises ApiError if this leader cannot commit it."""
        if self._last_offset >= 0:
            await self.partition.committed(self._last_offset)

    async def _run(self) -> None:
        try:
            await self._load()
            await self.releaser.run()
        except Exception:
            logger.exception("a shard of the schedule failed", extra={"partition": self.partition.index})
            self.schedule.reload_later(self)

    async def read(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a call in a thread that reads the log of this shard. Raises ApiError."""
        try:
            return await self.schedule.in_thread(call, *args, **kwargs)
        except ApiError as error:
            if self.is_current:
                self.schedule.handle_read_error(self.partition, error)
            raise

    async def _load(self) -> None:
        log, end, started = self.partition.log, self.partition.log.end, asyncio.get_running_loop().time()
        self._last_offset = end.offset - 1
        await self.read(load_sources, self.shard, log, end)
        self._knows_sources = True
        await self.read(load_groups, self.shard, log, end)
        await self.schedule.in_thread(self.indexes.begin)
        self.is_loaded = True
        if self.shard.sources:
            seconds = round(asyncio.get_running_loop().time() - started, 3)
            extra = {"partition": self.partition.index, "held": self.shard.held_count, "seconds": seconds}
            logger.info("schedule loaded", extra=extra)

    def earliest_due_ms(self) -> int | None:
        """The earliest due time of all sources."""
        firsts = (index.first_due_ms for index in self.indexes.by_source.values())
        return min((first_ms for first_ms in firsts if first_ms is not None), default=None)

    def first_due_ms(self, source: ScheduleSource) -> int | None:
        index = self.indexes.by_source.get(source)
        return None if index is None else index.first_due_ms
