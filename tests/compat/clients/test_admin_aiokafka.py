"""Administration through aiokafka."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import OffsetAndMetadata
from tests.compat import aio
from tests.compat.message import numbered
from tests.waiting import eventually_async


@pytest.fixture
async def aio_admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def test_a_topic_through_its_life(aio_admin: AIOKafkaAdminClient, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    created = await aio_admin.create_topics([NewTopic(name, 2, 1)])
    assert [each[1] for each in created.topic_errors] == [0]
    again = await aio_admin.create_topics([NewTopic(name, 2, 1)])
    assert [each[1] for each in again.topic_errors] == [36]

    async def partitions() -> int:
        [described] = await aio_admin.describe_topics([name])
        return len(described["partitions"])

    await eventually_async(lambda: _equals(partitions, 2))
    await aio_admin.create_partitions({name: NewPartitions(4)})
    await eventually_async(lambda: _equals(partitions, 4))
    await aio_admin.delete_topics([name])

    async def gone() -> bool:
        return name not in await aio_admin.list_topics()

    await eventually_async(gone)


async def _equals(ask: Callable[[], Any], expected: object) -> bool:
    return bool(await ask() == expected)


async def test_settings_of_a_topic(aio_admin: AIOKafkaAdminClient, topic: str) -> None:
    await aio_admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "5000"})])

    async def retention() -> str:
        [answer] = await aio_admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        [(_, _, _, _, entries)] = [tuple(each[:5]) for each in answer.resources]
        return {entry[0]: entry[1] for entry in entries}["retention.ms"]

    await eventually_async(lambda: _equals(retention, "5000"))


async def test_the_cluster_is_described(aio_admin: AIOKafkaAdminClient, bootstrap: str) -> None:
    described = await aio_admin.describe_cluster()
    [node] = described["brokers"]
    assert f"{node['host']}:{node['port']}" == bootstrap
    assert described["controller_id"] == node["node_id"]


async def test_groups_and_their_offsets(
    aio_admin: AIOKafkaAdminClient, bootstrap: str, topic: str, group: str
) -> None:
    await aio.publish_async(bootstrap, topic, numbered(10))
    partition = TopicPartition(topic, 0)
    async with contextlib.AsyncExitStack() as stack:
        member = await stack.enter_async_context(aio.consuming(bootstrap, topic, group_id=group))
        await aio.take(member, 10)
        await member.commit({partition: (6, "note")})
        assert group in {each[0] for each in await aio_admin.list_consumer_groups()}
        [answer] = await aio_admin.describe_consumer_groups([group])
        [described] = answer.groups
        assert described[1:4] == (group, "Stable", "consumer")
        assert len(described[5]) == 1
    stored = await aio_admin.list_consumer_group_offsets(group)
    assert stored == {partition: OffsetAndMetadata(6, "note")}


async def test_records_are_deleted(aio_admin: AIOKafkaAdminClient, bootstrap: str, topic: str) -> None:
    await aio.publish_async(bootstrap, topic, numbered(10))
    partition = TopicPartition(topic, 0)
    assert await aio_admin.delete_records({partition: RecordsToDelete(before_offset=6)}) == {partition: 6}
    async with aio.consuming(bootstrap) as client:
        client.assign([partition])
        assert [each.offset for each in await aio.take(client, 4)] == [6, 7, 8, 9]
