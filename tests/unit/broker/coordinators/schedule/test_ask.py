"""What a schedule shard tells movers: positions that are committed, also while another mover goes on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.scheduling.schedule_log import ScheduleSource, SourcePosition
from penstock.scheduling.schedule_shard import HeldChunk

SOURCE = ScheduleSource(UUID(int=7), 0)


class SlowPartition:
    """Commits when the test says so."""

    index, leader_epoch, is_leader, is_retired, has_enough_replicas = 0, 0, True, False, True

    def __init__(self) -> None:
        self.log = SimpleNamespace(end_offset=0)
        self.commits: list[asyncio.Future[None]] = []

    def append_internal(self, batch: bytearray, now_ms: int, *, leader_epoch: int) -> int:
        self.log.end_offset += 1
        return int(self.log.end_offset) - 1

    async def committed(self, offset: int) -> None:
        self.commits.append(asyncio.get_running_loop().create_future())
        await self.commits[-1]


def new_shard(folder: Path) -> tuple[ActiveScheduleShard, SlowPartition]:
    def spawn(work: Any) -> Any:
        work.close()
        return SimpleNamespace(cancel=lambda: None)

    environment = SimpleNamespace(spawn=spawn, now_ms=lambda: 0)
    image = SimpleNamespace(topics_by_id={SOURCE.topic_id: None})
    schedule: Any = SimpleNamespace(
        environment=environment, directory=folder, metadata=SimpleNamespace(image=image), appends=None
    )
    partition: Any = SlowPartition()
    shard = ActiveScheduleShard(schedule, partition)
    shard.is_loaded = True
    return shard, partition


def test_a_mover_is_told_no_position_of_another_mover_that_is_not_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard, partition = new_shard(tmp_path)
        first, second = SourcePosition(0, 10, 0), SourcePosition(1, 20, 0)
        shard.append(shard.shard.register(SOURCE, first))
        loop = asyncio.get_running_loop()
        asking = loop.create_task(shard.ask(ScheduleRequest(ScheduleOperation.POSITION, SOURCE)))
        await asyncio.sleep(0)
        moving = loop.create_task(
            shard.ask(ScheduleRequest(ScheduleOperation.MOVE, SOURCE, first, [HeldChunk.empty(second)]))
        )
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(partition.commits) == 2
        assert shard.shard.position(SOURCE) == second
        partition.commits[0].set_result(None)
        assert await asking == first
        partition.commits[1].set_result(None)
        assert await moving == second

    asyncio.run(scenario())
