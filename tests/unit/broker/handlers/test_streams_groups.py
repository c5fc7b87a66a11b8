"""StreamsGroupHeartbeat on the wire: refused topologies, and internal topics that cannot be created."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.streams_group_heartbeat.v0 import request as schema
from tests.streams_heartbeat import joining_heartbeat
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.node import Node
from penstock.groups.streams.topology import StreamsStatusCode
from penstock.protocol.errors import ErrorCode


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        await create_topic(node, "words", 2)
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[WireClient]:
    client = await WireClient.connect(node)
    yield client
    await client.close()


def changelog(name: str, replication_factor: int = 1, **configs: str) -> Any:
    pairs = tuple(schema.KeyValue(key=key, value=value) for key, value in configs.items())
    return schema.TopicInfo(
        name=name, partitions=0, replication_factor=replication_factor, topic_configs=pairs
    )


async def joined(client: WireClient, **fields: Any) -> Any:
    return await client.ask(joining_heartbeat(schema, "counting", **fields))


@pytest.mark.parametrize(
    ("topics", "message"),
    [
        ({"source_topics": ("no way!",)}, "Topic names no way! are not valid topic names."),
        ({"repartition_sink_topics": ("b!", "a!")}, "Topic names a!, b! are not valid topic names."),
        ({"state_changelog_topics": (changelog("x" * 250),)}, "are not valid topic names."),
        ({"source_topics": ("__consumer_offsets",)}, "Use of Kafka internal topics __consumer_offsets in"),
        ({"state_changelog_topics": (changelog("__transaction_state"),)}, "Use of Kafka internal topics"),
        ({"source_topics": tuple(f"t{number}" for number in range(5000))}, "more than 5000 subtopologies"),
    ],
)
async def test_a_topology_with_impossible_topics_is_refused(
    node: Node, client: WireClient, topics: dict[str, Any], message: str
) -> None:
    reply = await joined(client, **topics)
    assert reply.error_code is ErrorCode.streams_invalid_topology
    assert message in reply.error_message


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        (changelog("counts", replication_factor=3), "only 1 broker(s) are registered"),
        (changelog("counts", nosuch="1"), "Unknown topic config name: nosuch"),
    ],
)
async def test_members_are_told_why_an_internal_topic_is_not_created(
    client: WireClient, topic: Any, reason: str
) -> None:
    async def told() -> bool:
        reply = await joined(client, state_changelog_topics=(topic,))
        details = {status.status_code: status.status_detail for status in reply.status}
        detail: str = details[StreamsStatusCode.MISSING_INTERNAL_TOPICS]
        return detail.startswith("Internal topics are missing: counts; Creation failed: counts (") and (
            reason in detail
        )

    await eventually_async(told)


async def test_reasons_go_with_the_topic_and_are_bounded(
    node: Node, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.controller.topic_creation._FAILURES_MAX", 2)
    names = ("a!", "b!", "c!")
    node.auto_creation().begin_by_name(names)

    async def failed() -> bool:
        return list(node.auto_creation().failures(names)) == ["b!", "c!"]

    await eventually_async(failed)
    # The same name, which can be created now: what was said of it before is forgotten.
    await joined(client, state_changelog_topics=(changelog("counts", replication_factor=3),))

    async def failed_again() -> bool:
        return "counts" in node.auto_creation().failures(["counts"])

    await eventually_async(failed_again)
    node.auto_creation().begin_by_name(["counts"])

    async def created() -> bool:
        return "counts" in node.image.topics and not node.auto_creation().failures(["counts"])

    await eventually_async(created)
