"""Retention asks the schedule how far it has read; a shard that does not answer does not block the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import create_topic, running, until

from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
from penstock.broker.coordinators.schedule.messages import ScheduleRequest
from penstock.scheduling.schedule_log import SourcePosition


def followed(index: int) -> Any:
    """A partition that another node leads."""
    return SimpleNamespace(
        key=("t", index),
        topic_id=UUID(int=7),
        index=index,
        is_leader=False,
        log=SimpleNamespace(end_offset=9),
    )


async def test_a_shard_that_does_not_answer_is_not_asked_for_every_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ScheduleRequest] = []
    is_down = True

    async def ask(schedule: ScheduleCoordinator, what: ScheduleRequest) -> SourcePosition | None:
        asked.append(what)
        if is_down:
            raise TimeoutError
        return SourcePosition(0, 5)

    async with running(tmp_path, penstock_schedule_topic_num_partitions="1") as node:
        await create_topic(node, "jobs", penstock_schedule_enable="true")
        partition = node.partitions.find("jobs", 0)
        await until(lambda: partition.on_held is not None)
        monkeypatch.setattr(ScheduleCoordinator, "ask", ask)
        assert [await node.schedule().known_moved_offset(followed(index)) for index in range(50)] == [0] * 50
        assert len(asked) == 1
        is_down = False
        node.schedule()._silent_until.clear()  # a while later
        assert [await node.schedule().known_moved_offset(followed(index)) for index in range(3)] == [5] * 3
        monkeypatch.undo()
