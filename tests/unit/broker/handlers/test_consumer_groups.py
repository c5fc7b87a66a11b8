"""Consumer groups (KIP-848) on the wire: replies of each version, and what other APIs report about such groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.handlers.test_classic_groups import SETTINGS, Running
from tests.unit.broker.raw_client import new_node
from tests.unit.broker.wire_client import WireClient

from penstock.protocol.errors import ErrorCode

CONSUMER_HEARTBEAT, CONSUMER_DESCRIBE, OFFSET_FETCH = 68, 69, 9
DESCRIBE_GROUPS, LIST_GROUPS, DELETE_GROUPS, OFFSET_DELETE = 15, 16, 42, 47
#: Of a member that joins the group g and subscribes to t.
JOINING_HEARTBEAT: dict[str, Any] = {
    "group_id": "g",
    "member_id": "m",
    "member_epoch": 0,
    "instance_id": None,
    "rack_id": None,
    "rebalance_timeout": timedelta(seconds=30),
    "subscribed_topic_names": ("t",),
    "subscribed_topic_regex": None,
    "server_assignor": None,
    "topic_partitions": (),
}


class Consumers(Running):
    async def beat(self, version: int = 1, **fields: Any) -> Any:
        return await self.ask(CONSUMER_HEARTBEAT, version, **{**JOINING_HEARTBEAT, **fields})

    async def describe(self, version: int = 1, group: str = "g") -> Any:
        reply = await self.ask(
            CONSUMER_DESCRIBE, version, group_ids=(group,), include_authorized_operations=True
        )
        (found,) = reply.groups
        return found

    async def read(self, **member: Any) -> Any:
        wanted = SimpleNamespace(group_id="g", **member, topics=None)
        reply = await self.ask(OFFSET_FETCH, 9, groups=(wanted,), require_stable=False)
        (found,) = reply.groups
        return found


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Consumers]:
    node = new_node(tmp_path, **SETTINGS)
    await node.start()
    client = await WireClient.connect(node)
    running = Consumers(node, client)
    await running.create("t", 2)
    yield running
    await client.close()
    await node.stop()


async def test_a_member_joins_and_is_described(node: Consumers) -> None:
    reply = await node.beat()
    assert (reply.error_code, reply.member_id, reply.member_epoch) == (ErrorCode.none, "m", 1)
    assert reply.heartbeat_interval == timedelta(seconds=5)
    (topic,) = reply.assignment.topic_partitions
    assert (topic.topic_id, topic.partitions) == (node.node.image.topics["t"].id, (0, 1))
    found = await node.describe()
    assert (found.error_code, found.group_state, found.assignor_name) == (ErrorCode.none, "Stable", "uniform")
    (member,) = found.members
    assert (member.member_epoch, member.member_type, member.subscribed_topic_names) == (1, 1, ("t",))
    assert [topic.topic_name for topic in member.target_assignment.topic_partitions] == ["t"]
    listed = await node.ask(LIST_GROUPS, 5, states_filter=("stable",), types_filter=("Consumer",))
    assert [(group.group_id, group.group_type) for group in listed.groups] == [("g", "consumer")]


async def test_only_older_clients_are_given_an_id(node: Consumers) -> None:
    first = await node.beat(version=0, member_id="")
    assert first.error_code is ErrorCode.none
    assert first.member_id
    second = await node.beat(version=1, member_id="")
    assert second.error_code is ErrorCode.invalid_request


async def test_a_cluster_at_level_0_has_no_such_protocol(node: Consumers) -> None:
    node.node.image.features.pop("group.version")
    assert (await node.beat()).error_code is ErrorCode.unsupported_version


async def test_a_regular_expression_needs_version_1_and_must_be_one(node: Consumers) -> None:
    reply = await node.beat(subscribed_topic_names=None, subscribed_topic_regex="[")
    assert reply.error_code is ErrorCode.invalid_regular_expression
    assert "[" in reply.error_message
    reply = await node.beat(subscribed_topic_names=None, subscribed_topic_regex="t|u")
    assert reply.assignment.topic_partitions


async def test_a_member_may_subscribe_to_nothing(node: Consumers) -> None:
    """As in Kafka, where only to say nothing about it is an error."""
    reply = await node.beat(subscribed_topic_names=())
    assert (reply.error_code, reply.member_epoch) == (ErrorCode.none, 1)
    assert reply.assignment.topic_partitions == ()
    reply = await node.beat(subscribed_topic_names=None)
    assert reply.error_code is ErrorCode.invalid_request


async def test_offsets_are_for_members_at_their_epoch(node: Consumers) -> None:
    await node.beat()
    partition = SimpleNamespace(
        partition_index=0, committed_offset=3, committed_leader_epoch=-1, committed_metadata=""
    )
    topic = SimpleNamespace(name="t", partitions=(partition,))

    async def commit(version: int, epoch: int) -> ErrorCode:
        reply = await node.commit(version, topic, member_id="m", generation_id_or_member_epoch=epoch)
        code: ErrorCode = reply.topics[0].partitions[0].error_code
        return code

    assert await commit(9, 1) is ErrorCode.none
    assert await commit(9, 2) is ErrorCode.stale_member_epoch
    assert await commit(8, 1) is ErrorCode.unsupported_version
    assert (await node.read(member_id="m", member_epoch=1)).topics[0].partitions[0].committed_offset == 3
    assert (await node.read(member_id="m", member_epoch=0)).error_code is ErrorCode.stale_member_epoch
    assert (await node.read(member_id="x", member_epoch=1)).error_code is ErrorCode.unknown_member_id
    assert (await node.read(member_id=None, member_epoch=-1)).error_code is ErrorCode.none


async def test_what_the_older_requests_say_of_such_a_group(node: Consumers) -> None:
    await node.beat()
    described = await node.ask(DESCRIBE_GROUPS, 6, groups=("g",), include_authorized_operations=False)
    assert (described.groups[0].error_code, described.groups[0].group_state) == (
        ErrorCode.group_id_not_found,
        "Dead",
    )
    topics = (SimpleNamespace(name="t", partitions=(SimpleNamespace(partition_index=0),)),)
    deleted = await node.ask(OFFSET_DELETE, 0, group_id="g", topics=topics)
    assert deleted.topics[0].partitions[0].error_code is ErrorCode.group_subscribed_to_topic
    refused = await node.ask(DELETE_GROUPS, 2, groups_names=("g",))
    assert refused.results[0].error_code is ErrorCode.non_empty_group
    assert (await node.beat(member_epoch=-1)).member_epoch == -1
    assert (await node.describe()).group_state == "Empty"
    gone = await node.ask(DELETE_GROUPS, 2, groups_names=("g",))
    assert gone.results[0].error_code is ErrorCode.none
    gone = await node.describe()
    assert (gone.error_code, gone.error_message) == (ErrorCode.group_id_not_found, "Group g not found.")
