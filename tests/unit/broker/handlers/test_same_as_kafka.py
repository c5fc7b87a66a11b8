"""Replies that once differed from those of Apache Kafka to the same request."""

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.raw_client import Client, create_topic, produce_many, produced, running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

FETCH, LIST_OFFSETS, METADATA, FIND_COORDINATOR, DESCRIBE_GROUPS, DELETE_RECORDS = 1, 2, 3, 10, 15, 21
INIT_PRODUCER_ID, OFFSET_FOR_LEADER_EPOCH, DESCRIBE_CLUSTER = 22, 23, 60
OPERATIONS_NOT_ASKED = -(2**31)
EARLIEST, LATEST = -2, -1


class Asked:
    """A node, and requests that have the fields of all versions at once."""

    def __init__(self, node: Node, client: WireClient) -> None:
        self.node = node
        self.client = client

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        return await self.client.ask(SimpleNamespace(**fields), api_key=api_key, version=version)

    async def publish(self, topic: str) -> None:
        client = await Client.connect(self.node)
        assert (await client.produce(topic, b"x", acks=-1)).error is ErrorCode.none
        client.writer.close()


@contextlib.asynccontextmanager
async def asking(tmp_path: Path, **settings: str) -> AsyncIterator[Asked]:
    async with running(tmp_path, **settings) as node:
        client = await WireClient.connect(node)
        yield Asked(node, client)
        await client.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Asked]:
    async with asking(tmp_path) as found:
        yield found


# Produce


async def test_one_replica_is_enough_where_there_is_one(node: Asked) -> None:
    await create_topic(node.node, "t", min_insync_replicas="2")
    await node.publish("t")


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_without_a_timeout_a_publisher_waits_for_the_nodes_own_sync(
    node: Asked, timeout_ms: int
) -> None:
    await create_topic(node.node, "t")
    client = await Client.connect(node.node)
    result = await client.produce("t", b"x", acks=-1, timeout_ms=timeout_ms)
    assert (result.error, result.offset) == (ErrorCode.none, 0)
    client.writer.close()


async def test_a_transactional_batch_is_refused_for_good(node: Asked) -> None:
    await create_topic(node.node, "t")
    batch = encode_batch(
        [Record(0, 0, None, b"x")],
        attributes=TRANSACTIONAL,
        producer_id=1,
        producer_epoch=0,
        base_sequence=0,
    )
    client = await Client.connect(node.node)
    (result,) = produced(await client.ask(produce_many([("t", [(0, bytes(batch))])])))
    assert result.error is ErrorCode.transactional_id_authorization_failed
    client.writer.close()


# Leader epochs: a leader's own begins when it becomes leader, not with its first write


async def listed(node: Asked, timestamp: int) -> tuple[int, int]:
    part = SimpleNamespace(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
    topic = SimpleNamespace(name="t", partitions=(part,))
    response = await node.ask(
        LIST_OFFSETS, 4, replica_id=-1, isolation_level=0, topics=(topic,), timeout=timedelta(0)
    )
    found = response.topics[0].partitions[0]
    assert found.error_code is ErrorCode.none
    return found.offset, found.leader_epoch


async def epoch_end(node: Asked, epoch: int) -> tuple[int, int]:
    part = SimpleNamespace(partition=0, current_leader_epoch=-1, leader_epoch=epoch)
    topic = SimpleNamespace(topic="t", partitions=(part,))
    response = await node.ask(OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=(topic,))
    found = response.topics[0].partitions[0]
    assert found.error_code is ErrorCode.none
    return found.leader_epoch, found.end_offset


async def test_an_empty_partition_knows_its_leaders_epoch(node: Asked) -> None:
    await create_topic(node.node, "t")
    assert await listed(node, LATEST) == await listed(node, EARLIEST) == (0, 0)
    assert await epoch_end(node, 0) == (0, 0)
    assert await epoch_end(node, 1) == (-1, -1)


async def test_a_new_leader_knows_its_epoch_before_it_writes(tmp_path: Path) -> None:
    async with asking(tmp_path) as node:
        await create_topic(node.node, "t")
        await node.publish("t")
    for _ in range(2):
        async with asking(tmp_path) as node:
            epoch = node.node.partitions.find("t", 0).leader_epoch
            assert await listed(node, EARLIEST) == (0, 0)
            assert await listed(node, LATEST) == (1, epoch)
            assert await epoch_end(node, 0) == (0, 1)
            assert await epoch_end(node, epoch) == (epoch, 1)
            assert await epoch_end(node, epoch + 1) == (-1, -1)
    assert epoch == 2
    async with asking(tmp_path) as node:
        await node.publish("t")
        assert await epoch_end(node, 1) == (0, 1)
        assert await epoch_end(node, 3) == (3, 2)
        assert await listed(node, LATEST) == (2, 3)


async def test_a_follower_of_an_empty_partition_does_not_diverge(node: Asked) -> None:
    await create_topic(node.node, "t")
    part = SimpleNamespace(
        partition=0,
        current_leader_epoch=0,
        fetch_offset=0,
        last_fetched_epoch=0,
        log_start_offset=-1,
        partition_max_bytes=100,
    )
    response = await node.ask(
        FETCH,
        12,
        cluster_id=None,
        replica_id=-1,
        max_wait=timedelta(0),
        min_bytes=0,
        max_bytes=100,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=(SimpleNamespace(topic="t", partitions=(part,)),),
        forgotten_topics_data=(),
        rack_id="",
    )
    found = response.responses[0].partitions[0]
    assert found.error_code is ErrorCode.none
    assert (found.diverging_epoch.epoch, found.high_watermark) == (-1, 0)


# Metadata


async def metadata(node: Asked, version: int, *topics: Any, operations: bool = False) -> Any:
    return await node.ask(
        METADATA,
        version,
        topics=topics,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=operations,
        include_topic_authorized_operations=False,
    )


@pytest.mark.parametrize("version", [8, 9, 10])
async def test_what_one_may_do_in_the_cluster_is_told_when_asked(node: Asked, version: int) -> None:
    told = await metadata(node, version, operations=True)
    assert told.cluster_authorized_operations > 0
    assert (await metadata(node, version)).cluster_authorized_operations == OPERATIONS_NOT_ASKED


@pytest.mark.parametrize("version", [10, 11])
async def test_metadata_by_id_is_refused_as_a_whole_before_it_has_a_meaning(
    node: Asked, version: int
) -> None:
    await create_topic(node.node, "t")
    by_id = SimpleNamespace(name=None, topic_id=node.node.image.topics["t"].id)
    response = await metadata(node, version, by_id, SimpleNamespace(name="t", topic_id=None))
    assert {topic.error_code for topic in response.topics} == {ErrorCode.invalid_request}
    assert (response.brokers, response.cluster_id, response.controller_id) == ((), None, -1)


# The cluster, its groups and producers


async def test_another_kind_of_endpoint_is_told_nothing_of_this_one(node: Asked) -> None:
    response = await node.ask(
        DESCRIBE_CLUSTER,
        2,
        include_cluster_authorized_operations=True,
        endpoint_type=2,
        include_fenced_brokers=False,
    )
    assert response.error_code is ErrorCode.mismatched_endpoint_type
    assert (response.cluster_id, response.controller_id, response.brokers) == ("", -1, ())


async def test_each_key_that_is_looked_for_has_its_answer(node: Asked) -> None:
    response = await node.ask(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=("g", "h", "g"))
    assert [each.key for each in response.coordinators] == ["g", "h", "g"]


@pytest.mark.parametrize(("version", "told"), [(3, True), (5, True), (6, False)])
async def test_what_one_may_do_with_a_group_that_is_not_there(node: Asked, version: int, told: bool) -> None:
    await node.ask(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=("g",))
    response = await node.ask(DESCRIBE_GROUPS, version, groups=("g",), include_authorized_operations=True)
    assert (response.groups[0].authorized_operations != OPERATIONS_NOT_ASKED) is told


async def test_an_empty_transactional_id_is_none_at_all(node: Asked) -> None:
    response = await node.ask(
        INIT_PRODUCER_ID,
        4,
        transactional_id="",
        transaction_timeout=timedelta(seconds=1),
        producer_id=-1,
        producer_epoch=-1,
    )
    assert response.error_code is ErrorCode.invalid_request


async def test_a_topic_named_twice_loses_none_of_its_deletions(node: Asked) -> None:
    await create_topic(node.node, "t", 2)
    await node.publish("t")

    def up_to(partition: int, offset: int) -> Any:
        part = SimpleNamespace(partition_index=partition, offset=offset)
        return SimpleNamespace(name="t", partitions=(part,))

    response = await node.ask(
        DELETE_RECORDS,
        2,
        topics=(up_to(0, 9), up_to(1, 0), up_to(0, 1)),
        timeout=timedelta(seconds=1),
    )
    (topic,) = response.topics
    assert [(p.partition_index, p.error_code, p.low_watermark) for p in topic.partitions] == [
        (0, ErrorCode.none, 1),
        (1, ErrorCode.none, 0),
    ]
