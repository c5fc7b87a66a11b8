"""Pruning `__share_group_state`: its updates build on each other, so it is not compacted but said again, and cut off.

When a shard's log has grown enough since the last time, all that the shard knows is written down once more, and what
was in the log before goes. So the log stays a small multiple of the state, and a load reads no more than that.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import ActiveShard, Token, Work
    from penstock.broker.node import Node
    from penstock.broker.share_state.coordinator import ShareStateCoordinator
    from penstock.groups.share_state.shard import ShareStateShard

logger = logging.getLogger("penstock.share")

#: Fewer records are not worth it.
_RECORDS_MIN: Final = 5_000
#: How many times what was left the last time.
_GROWN_FACTOR: Final = 4
#: Share partitions that are written down at a time, and about how many bytes of them.
_PIECE_MAX: Final = 100
_PIECE_BYTES_MAX: Final = 256 << 10


class Pruning:
    def __init__(self, node: Node, coordinator: ShareStateCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._task: asyncio.Task[None] | None = None
        self._left: dict[int, int] = {}  # records that said all, by shard

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._node.spawn(self._run())

    async def _run(self) -> None:
        interval_s = self._node.settings.integer("share.coordinator.state.topic.prune.interval.ms") / 1000
        while True:
            await asyncio.sleep(interval_s)
            for index in self._coordinator.shards():
                try:
                    await self.prune(index)
                except ApiError as error:
                    logger.info("share state of shard %d is pruned later: %r", index, error)
                except Exception:
                    # Without this task no shard's log would ever be cut.
                    logger.exception("share state of shard %d is pruned later", index)

    async def prune(self, index: int, *, records_min: int = _RECORDS_MIN) -> bool:
        """Whether it has grown enough, and was cut. Raises ApiError."""
        partition = self._node.partitions.led(self._coordinator.topic.name, index)
        if partition is None:
            return False
        grown = partition.log.end_offset - partition.log.start_offset
        if grown < max(_GROWN_FACTOR * self._left.get(index, 0), records_min):
            return False
        active = await self._coordinator.active_shard(index)
        # All that is known now is said again behind this offset, or changes behind it.
        cut_offset = partition.log.end_offset
        config = partition.log.config
        # No batch is larger than a segment, and lengths come on top.
        batch_bytes_max = min(config.segment_bytes, config.max_message_bytes) // 2
        await self._say_again(active, min(_PIECE_BYTES_MAX, batch_bytes_max))
        if active.is_closed or partition.high_watermark < cut_offset:
            return False
        partition.log.delete_records_before(cut_offset)
        partition.start_moved()
        self._left[index] = partition.log.end_offset - cut_offset
        return True

    async def _say_again(self, active: ActiveShard[ShareStateShard], bytes_max: int) -> None:
        names, said = active.shard.names(), 0
        while said < len(names):
            checkpoint = partial(_checkpoint, names[said : said + _PIECE_MAX], self._node.now_ms(), bytes_max)
            said += await active.submit(checkpoint)


def _checkpoint(
    names: tuple[bytes, ...], now_ms: int, bytes_max: int, shard: ShareStateShard, token: Token
) -> Work:
    return shard.checkpoint(names, token, now_ms=now_ms, bytes_max=bytes_max)
