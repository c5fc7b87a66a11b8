"""Heartbeats and fencing continue after an unexpected error, which is logged."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.controller.small_cluster import Cluster
from tests.unit.broker.virtual_time import in_virtual_time

from penstock.broker.controller import broker_lifecycle
from penstock.cluster.controller import heartbeats
from penstock.protocol.errors import ApiError, ErrorCode


async def _three(folder: Path) -> Cluster:
    cluster = Cluster(folder)
    cluster.elect(1)
    await cluster.start()
    return cluster


@in_virtual_time
async def test_a_broker_that_cannot_write_its_run_down_goes_on_reporting(tmp_path: Path) -> None:
    cluster = await _three(tmp_path)
    broker = cluster[2].lifecycle
    answers: list[Exception] = [ApiError(ErrorCode.stale_broker_epoch), RuntimeError("unforeseen")]
    real = broker._heartbeat

    async def heartbeat() -> Any:
        if answers:
            raise answers.pop(0)
        return await real()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "_heartbeat", heartbeat)
        patch.setattr(broker_lifecycle, "note_run", full)
        await asyncio.sleep(30)
    assert not answers
    assert not cluster[1].image.brokers[2].fenced


@in_virtual_time
async def test_a_controller_fences_after_a_look_that_failed(tmp_path: Path) -> None:
    cluster = await _three(tmp_path)
    real, failures = heartbeats.fence_brokers, [1]

    def fence(*args: Any, **options: Any) -> Any:
        if failures:
            failures.clear()
            raise AssertionError("unforeseen")
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeats, "fence_brokers", fence)
        cluster.cuts.add((2, 1))
        await asyncio.sleep(60)
    assert not failures
    assert cluster[1].image.brokers[2].fenced
