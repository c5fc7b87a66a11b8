"""The mover of a partition that this node leads: hands held records over to the shard that keeps them.

It looks at what is committed, and of transactions at those that are. What it has handed over is known to the shard, so
the next leader goes on from there; what it hands over twice is taken once. It knows where records were held since it
began, and reads nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.schedule.scan import Scanned, scan
from penstock.broker.schedule.wire import Ask, What
from penstock.protocol.errors import ApiError
from penstock.scheduling.moving import Chunk, chunks_of, continued
from penstock.scheduling.records import Position, Source

if TYPE_CHECKING:
    from penstock.broker.partition import Partition
    from penstock.broker.schedule.service import Schedule
    from penstock.log.log import Log
    from penstock.log.positions import LogPosition

logger = logging.getLogger("penstock.schedule")

#: What is handed over in one request.
_MOVE_BYTES: Final = 512 << 10
_BACKOFF_S: Final = 0.05
_BACKOFF_MAX_S: Final = 2.0
#: How often the shard is told of progress over records that are not held.
_SAVE_S: Final = 30.0


class Mover:
    def __init__(self, schedule: Schedule, partition: Partition) -> None:
        self._schedule = schedule
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.source = Source(partition.topic_id, partition.index)
        self._position: Position | None = None  # as the shard has it
        self._next = self._last_held = 0  # what to look at next; where the last held records may be
        self._save_at = self._clock() + _SAVE_S
        self._wake = asyncio.Event()
        self._task = schedule.node.spawn(self._run())

    def __repr__(self) -> str:
        name = f"{self.partition.topic}-{self.partition.index}"
        return f"<Mover of {name} at {self._next}, {self._position} is saved>"

    @property
    def is_current(self) -> bool:
        partition = self.partition
        return (
            partition.is_leader and partition.leader_epoch == self.leader_epoch and not partition.is_retired
        )

    @property
    def taken_offset(self) -> int:
        """What is at or beyond this offset is still needed here; 0 while that is not known."""
        if self._position is None:
            return 0
        return self.partition.log.end_offset if self._is_idle else self._next

    @property
    def is_at_work(self) -> bool:
        return self._position is not None

    @property
    def _is_idle(self) -> bool:
        return self._next > self._last_held

    def close(self) -> None:
        self._task.cancel()
        self.partition.unwatch(self)
        if self.partition.on_held == self._held_at:
            self.partition.on_held = None

    def configured(self) -> None:
        """The topic's settings may have changed."""
        if self._position is not None and self.partition.is_scheduled:
            self.partition.on_held = self._held_at
        if self._task.done() and self.partition.is_scheduled:
            self._task = self._schedule.node.spawn(self._run())

    def bytes_arrived(self, count: int) -> None:
        """More has been committed."""
        self._wake.set()

    def _held_at(self, offset: int) -> None:
        if self._is_idle:
            self._next = offset
        self._last_held = offset
        self._wake.set()

    async def _run(self) -> None:
        backoff_s = _BACKOFF_S
        while self.is_current:
            try:
                if self._position is None and not await self._begin():
                    return
                await self._move_on()
                backoff_s = _BACKOFF_S
            except (ApiError, ConnectionError, TimeoutError) as error:
                # Once is no news: a shard takes a moment to load.
                level = logging.DEBUG if backoff_s == _BACKOFF_S else logging.INFO
                logger.log(
                    level, "cannot hand held records over", extra={"mover": repr(self), "reason": str(error)}
                )
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
            except Exception:
                logger.exception("mover failed", extra={"mover": repr(self)})
                await asyncio.sleep(_BACKOFF_MAX_S)

    async def _begin(self) -> bool:
        """Find out where to go on; False when nothing was ever held here and nothing will be."""
        partition = self.partition
        if partition.is_scheduled:
            await self._schedule.ensure_topic()
        position = await self._schedule.ask(Ask(What.POSITION, self.source))
        if position is None:
            if not partition.is_scheduled:
                return False
            # Held records are taken from here on only, so there are none before.
            start = Position(self.leader_epoch, partition.log.end_offset)
            position = await self._schedule.ask(Ask(What.REGISTER, self.source, start))
            assert position is not None
        self._go_on_from(position)
        self._last_held = max(self._last_held, partition.log.end_offset - 1)
        if partition.is_scheduled:
            partition.on_held = self._held_at
        return True

    def _go_on_from(self, position: Position) -> None:
        self._position = position
        partition, offset = self.partition, position.offset
        _, end = partition.end_of_epoch(position.epoch)
        if 0 <= end < offset:
            # An unclean election has taken away what the last leader had handed over.
            offset = end
        self._next = max(offset, partition.log.start_offset)

    async def _move_on(self) -> None:
        partition, upto = self.partition, self.partition.last_stable
        self._wake.clear()
        if self._clock() > self._save_at:
            await self._save()
        elif self._is_idle:
            await self._rest()
        elif self._next >= upto.offset:
            await self._more_committed()
        else:
            await self._look(partition.log, upto)

    async def _look(self, log: Log, upto: LogPosition) -> None:
        scanned = await self._schedule.node.in_thread(scan, log, self._next, upto)
        if not self.is_current or (scanned.found and not await self._hand_over(scanned)):
            return
        if scanned.next_offset == self._next and self.partition.last_stable.offset == upto.offset:
            # The batch that held records belong to is not committed yet, or its transaction has not ended.
            await self._more_committed()
        self._next = max(self._next, scanned.next_offset)

    async def _more_committed(self) -> None:
        self.partition.watch(self)
        try:
            await self._rest()
        finally:
            self.partition.unwatch(self)

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVE_S):
                await self._wake.wait()

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()

    async def _save(self) -> None:
        """So that the next leader need not look at what this one has passed over, and followers need not keep it."""
        self._save_at = self._clock() + _SAVE_S
        assert self._position is not None
        offset = min(self.taken_offset, self.partition.last_stable.offset)
        if offset > self._position.offset:
            to = Position(self.partition.epoch_at(offset - 1), offset)
            await self._send([Chunk.empty(to)])

    async def _hand_over(self, scanned: Scanned) -> bool:
        """False when the shard is elsewhere, and so are we now."""
        assert self._position is not None
        found = continued(self._position, scanned.found)
        chunks = await self._schedule.node.in_thread(lambda: list(chunks_of(found)))
        for part in _parts(chunks):
            if not await self._send(part):
                return False
        return True

    async def _send(self, chunks: list[Chunk]) -> bool:
        assert self._position is not None
        position = await self._schedule.ask(Ask(What.MOVE, self.source, self._position, chunks))
        if position is None:
            self._position = None  # the shard has forgotten the source: begin anew
            return False
        if position == chunks[-1].position:
            self._position = position
            self._next = max(self._next, position.offset)  # a later part may fail, and this one is taken
            return True
        self._go_on_from(position)
        return False


def _parts(chunks: Iterable[Chunk]) -> Iterable[list[Chunk]]:
    part: list[Chunk] = []
    size = 0
    for chunk in chunks:
        part.append(chunk)
        size += sum(map(len, chunk.blocks))
        if size >= _MOVE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
