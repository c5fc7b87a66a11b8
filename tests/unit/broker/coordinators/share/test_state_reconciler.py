"""Share groups on real nodes: state that cannot be created at once, dead coordinators, deletions."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.alter_share_group_offsets.v0 import request as altering
from kio.schema.delete_share_group_offsets.v0 import request as deleting
from kio.schema.share_group_heartbeat.v1.request import ShareGroupHeartbeatRequest
from tests.unit.broker.coordinators.share.dead_letter_harness import started
from tests.unit.broker.raw_client import create_topic, until
from tests.unit.broker.three_nodes import Trio
from tests.waiting import eventually_async

from penstock.broker.coordinators.share import state_reconciler as upkeep_module
from penstock.broker.node import Node
from penstock.groups.share.state.share_state import UNSET
from penstock.protocol.errors import ApiError, ErrorCode

GROUP, TOPIC = "workers", "jobs"
HEARTBEAT, ALTER, DELETE = 76, 91, 92


async def beat(node: Node, epoch: int, *topics: str, member: str = "a") -> Any:
    request = ShareGroupHeartbeatRequest(
        group_id=GROUP,
        member_id=member,
        member_epoch=epoch,
        rack_id=None,
        subscribed_topic_names=topics or None,
    )
    return await node.brokers.call_local(HEARTBEAT, request)


def read_by(reply: Any) -> dict[UUID, tuple[int, ...]]:
    assert reply.error_code is ErrorCode.none, reply
    return {part.topic_id: part.partitions for part in reply.assignment.topic_partitions}


async def alter(node: Node, **starts: int) -> list[ErrorCode]:
    parts = [
        altering.AlterShareGroupOffsetsRequestPartition(partition_index=int(index[1:]), start_offset=start)
        for index, start in starts.items()
    ]
    topic = altering.AlterShareGroupOffsetsRequestTopic(topic_name=TOPIC, partitions=tuple(parts))
    request = altering.AlterShareGroupOffsetsRequest(group_id=GROUP, topics=(topic,))
    reply = await node.brokers.call_local(ALTER, request)
    if reply.error_code is not ErrorCode.none:
        return [reply.error_code]
    return [part.error_code for part in reply.responses[0].partitions]


async def delete(node: Node) -> ErrorCode:
    topic = deleting.DeleteShareGroupOffsetsRequestTopic(topic_name=TOPIC)
    request = deleting.DeleteShareGroupOffsetsRequest(group_id=GROUP, topics=(topic,))
    reply = await node.brokers.call_local(DELETE, request)
    return reply.error_code if reply.error_code is not ErrorCode.none else reply.responses[0].error_code


class Reluctant:
    """A persister whose coordinator does not take what it is asked for, until it does."""

    def __init__(self, node: Node, name: str, patch: pytest.MonkeyPatch) -> None:
        self.is_willing = False
        self.calls = 0
        persister = node.share_state().persister
        real = getattr(persister, name)

        async def ask(*arguments: Any, **named: Any) -> None:
            self.calls += 1
            if not self.is_willing:
                raise ApiError(ErrorCode.coordinator_not_available)
            await real(*arguments, **named)

        patch.setattr(persister, name, ask)


async def test_who_joins_is_told_its_partitions_at_once(tmp_path: Path) -> None:
    node = await started(tmp_path)
    await create_topic(node, TOPIC, partitions=2)
    reply = await beat(node, 0, TOPIC)
    assert read_by(reply) == {node.image.topics[TOPIC].id: (0, 1)}
    assert (await beat(node, reply.member_epoch)).assignment is None
    assert (await beat(node, reply.member_epoch + 1)).error_code is ErrorCode.fenced_member_epoch
    await node.stop()


async def test_what_cannot_be_initialised_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await started(tmp_path, group_share_initialize_retry_interval_ms="50")
    await create_topic(node, TOPIC)
    coordinator = Reluctant(node, "initialize", monkeypatch)
    reply = await beat(node, 0, TOPIC)
    assert read_by(reply) == {}
    epoch = reply.member_epoch

    async def is_tried_again() -> bool:
        await beat(node, epoch)
        return coordinator.calls > 2

    async def is_told() -> Any:
        reply = await beat(node, epoch)
        return reply if reply.assignment is not None else None

    await eventually_async(is_tried_again)
    coordinator.is_willing = True
    reply = await eventually_async(is_told)
    assert read_by(reply) == {node.image.topics[TOPIC].id: (0,)}
    await node.stop()


async def test_a_deletion_that_fails_is_finished_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await started(tmp_path, group_share_initialize_retry_interval_ms="1")
    await create_topic(node, TOPIC)
    topic_id = node.image.topics[TOPIC].id
    assert await alter(node, p0=7) == [ErrorCode.none]
    with monkeypatch.context() as patch:
        coordinator = Reluctant(node, "delete", patch)
        assert await delete(node) is ErrorCode.coordinator_not_available
        assert read_by(await beat(node, 0, TOPIC)) == {}
        await beat(node, -1)
        assert await alter(node, p0=9) == [ErrorCode.coordinator_not_available]
        coordinator.is_willing = True
        await eventually_async(lambda: _is_altered(node))
    summary = await node.share_state().persister.summary(GROUP, topic_id, 0)
    assert summary.start_offset == 9
    assert await delete(node) is ErrorCode.none
    summary = await node.share_state().persister.summary(GROUP, topic_id, 0)
    assert summary.start_offset == UNSET
    await node.stop()


async def test_a_deletion_that_arrives_late_leaves_what_was_begun_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a coordinator of the group that has been replaced while its request was on the way."""
    node = await started(tmp_path)
    await create_topic(node, TOPIC)
    persister = node.share_state().persister
    real, said = persister.delete, []

    async def overheard(*place: Any, **named: Any) -> None:
        said.append((place, named))
        await real(*place, **named)

    monkeypatch.setattr(persister, "delete", overheard)
    assert await alter(node, p0=7) == [ErrorCode.none]
    assert await delete(node) is ErrorCode.none
    reply = await beat(node, 0, TOPIC)
    assert read_by(reply) == {node.image.topics[TOPIC].id: (0,)}
    await beat(node, -1)
    ((place, named),) = said
    with pytest.raises(ApiError) as raised:
        await real(*place, **named)
    assert raised.value.code is ErrorCode.fenced_state_epoch
    assert await alter(node, p0=9) == [ErrorCode.none]
    assert await delete(node) is ErrorCode.none
    await node.stop()


async def _is_altered(node: Node) -> bool:
    return await alter(node, p0=9) == [ErrorCode.none]


async def test_moves_are_refused_partition_by_partition(tmp_path: Path) -> None:
    node = await started(tmp_path)
    await create_topic(node, TOPIC)
    unknown = ErrorCode.unknown_topic_or_partition
    assert await alter(node, p0=7, p1=3) == [ErrorCode.none, unknown]
    assert await alter(node, p0=-1, p1=3) == [ErrorCode.invalid_request, unknown]
    assert await delete(node) is ErrorCode.none
    assert await delete(node) is unknown
    await beat(node, 0, TOPIC)
    assert await alter(node, p0=7) == [ErrorCode.non_empty_group]
    await node.stop()


async def test_the_next_coordinator_goes_on_with_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "RECONCILE_WAIT_S", 0.1)
    trio = Trio(tmp_path)
    await trio.start()
    await trio.create_topic(TOPIC, partitions=3)
    topic_id = trio.any.image.topics[TOPIC].id
    try:
        await trio.any.groups.ensure_topic()
        index = trio.any.groups.shard_of(GROUP)
        await until(lambda: trio.leader("__consumer_offsets", index) is not None)
        first = trio.leader("__consumer_offsets", index)
        assert first is not None
        with monkeypatch.context() as patch:
            Reluctant(first, "initialize", patch)
            reply = await beat(first, 0, TOPIC)
            assert read_by(reply) == {}
            await trio.kill(first.node_id)
        await until(lambda: trio.leader("__consumer_offsets", index) not in (None, first))
        second = trio.leader("__consumer_offsets", index)
        assert second is not None
        epoch = reply.member_epoch

        async def is_told() -> Any:
            nonlocal epoch
            reply = await beat(second, epoch)
            epoch = reply.member_epoch if reply.error_code is ErrorCode.none else epoch
            return reply if reply.assignment is not None and reply.assignment.topic_partitions else None

        reply = await eventually_async(is_told)
        assert read_by(reply) == {topic_id: (0, 1, 2)}
    finally:
        await trio.stop()
