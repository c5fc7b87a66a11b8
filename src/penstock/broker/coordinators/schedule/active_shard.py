"""A shard of the schedule at work: on the leader of its partition, for as long as it leads in that epoch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.broker.schedule.blocks import BlockFile
from penstock.broker.schedule.index import Indexes
from penstock.broker.schedule.loading import load_groups, load_sources
from penstock.broker.schedule.releaser import Releaser
from penstock.broker.schedule.wire import Ask, What
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import Record, encode_batch
from penstock.scheduling.records import Position, Source
from penstock.scheduling.shard import KeyValue, ScheduleShard

if TYPE_CHECKING:
    from penstock.broker.partition import Partition
    from penstock.broker.schedule.service import Schedule

logger = logging.getLogger("penstock.schedule")


class ShardHost:
    def __init__(self, schedule: Schedule, partition: Partition) -> None:
        self.schedule = schedule
        self.node = schedule.node
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.indexes = Indexes(BlockFile(self.node.store.directory))
        self.shard = ScheduleShard(self.indexes)
        self.releaser = Releaser(self)
        self._knows_sources = self.is_loaded = False
        self._last_offset = -1
        self._task = self.node.spawn(self._run())

    def __repr__(self) -> str:
        return f"<ShardHost {self.partition.index} {self.shard!r}>"

    @property
    def is_current(self) -> bool:
        partition = self.partition
        return (
            partition.is_leader and partition.leader_epoch == self.leader_epoch and not partition.is_retired
        )

    @property
    def knows_topics(self) -> bool:
        """A topic that is not in the image has been deleted, and is not yet to come."""
        return self.schedule.image_shows(self.partition.index, self.leader_epoch)

    def close(self) -> None:
        self._task.cancel()
        self.releaser.close()

    async def ask(self, ask: Ask) -> Position | None:
        """What movers ask; answered when it is committed. Raises ApiError."""
        self._check_ready(ask.what)
        if ask.source.topic_id not in self.node.image.topics_by_id:
            raise ApiError(ErrorCode.unknown_topic_id)
        match ask.what:
            case What.REGISTER:
                self.append(self.shard.register(ask.source, ask.position))
            case What.MOVE:
                await self._take(ask)
        await self.committed()
        return self.shard.position(ask.source)

    def _check_ready(self, what: What) -> None:
        """Where sources are is known before what is held of them, so that producers need not wait for that."""
        if not self.is_loaded and not (what is What.POSITION and self._knows_sources):
            raise ApiError(ErrorCode.coordinator_load_in_progress)
        if not self.is_current:
            raise ApiError(ErrorCode.not_coordinator)

    async def _take(self, ask: Ask) -> None:
        expected = ask.position
        for chunk in ask.chunks:
            await self.releaser.gathered(ask.source)
            offset = self.partition.log.end_offset
            self.append(self.shard.take(ask.source, expected, chunk, offset), chunk.codec)
            expected = chunk.position
            await asyncio.sleep(0)
        self.releaser.wake()

    def append(self, records: Sequence[KeyValue], codec: Codec = Codec.NONE) -> None:
        """As one batch, replayed at once. Raises ApiError, and then nothing has changed."""
        if not records:
            return
        if not self.partition.has_enough_replicas:
            raise ApiError(ErrorCode.not_enough_replicas)
        now_ms, base_offset = self.node.now_ms(), self.partition.log.end_offset
        batch = encode_batch(
            [Record(place, now_ms, key, value) for place, (key, value) in enumerate(records)], codec=codec
        )
        self._last_offset = self.partition.append_internal(batch, now_ms, leader_epoch=self.leader_epoch)
        assert self._last_offset == base_offset + len(records) - 1
        for place, (key, value) in enumerate(records):
            self.shard.replay(base_offset + place, key, value)

    async def committed(self) -> None:
        """Once all that was appended so far is. Raises ApiError when it never will be, by this leader."""
        if self._last_offset >= 0:
            await self.partition.committed(self._last_offset)

    async def _run(self) -> None:
        try:
            await self._load()
            await self.releaser.run()
        except Exception:
            logger.exception("part of the schedule failed", extra={"partition": self.partition.index})
            self.schedule.begin_anew(self)

    async def _load(self) -> None:
        log, end, started = self.partition.log, self.partition.log.end, asyncio.get_running_loop().time()
        self._last_offset = end.offset - 1
        await self.schedule.in_thread(load_sources, self.shard, log, end)
        self._knows_sources = True
        await self.schedule.in_thread(load_groups, self.shard, log, end)
        await self.schedule.in_thread(self.indexes.begin)
        self.is_loaded = True
        if self.shard.sources:
            seconds = round(asyncio.get_running_loop().time() - started, 3)
            extra = {"partition": self.partition.index, "held": self.shard.held_count, "seconds": seconds}
            logger.info("schedule loaded", extra=extra)

    def earliest_due_ms(self) -> int | None:
        """Of all sources."""
        firsts = (index.first_due_ms for index in self.indexes.by_source.values())
        return min((first_ms for first_ms in firsts if first_ms is not None), default=None)

    def first_due_ms(self, source: Source) -> int | None:
        index = self.indexes.by_source.get(source)
        return None if index is None else index.first_due_ms
