"""A subscription by regular expression does not reveal topics that the member may not describe."""

from pathlib import Path
from typing import Any
from uuid import uuid4

from kio.schema.consumer_group_heartbeat.v1 import request as beat
from tests.access.matrix import GROUP, MILLISECOND, READ_GROUP, rule
from tests.access.ours import SETTINGS, Client
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import create_topic

from penstock.protocol.acls import Operation, ResourceType

VISIBLE, SECRET = "m-visible", "m-secret"


def heartbeat(member_epoch: int, member_id: str, **values: Any) -> Any:
    given: dict[str, Any] = {
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 60_000 * MILLISECOND,
        "subscribed_topic_names": None,
        "subscribed_topic_regex": "m-.*",
        "server_assignor": None,
        "topic_partitions": (),
    }
    return beat.ConsumerGroupHeartbeatRequest(
        group_id=GROUP, member_id=member_id, member_epoch=member_epoch, **given | values
    )


async def test_only_topics_that_the_member_may_describe_match(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        for name in (VISIBLE, SECRET):
            await create_topic(node, name)
        assert node.authorizer is not None
        needs = (READ_GROUP, (Operation.DESCRIBE, ResourceType.TOPIC, VISIBLE))
        node.authorizer.update({uuid4(): rule(need) for need in needs})
        client = Client(node)
        joined = await client.ask(heartbeat(0, "member"))
        assigned = {topic.topic_id for topic in joined.assignment.topic_partitions}
        assert assigned == {node.image.topics[VISIBLE].id}
        # A topic that is created later is matched with the same rights.
        await create_topic(node, "m-secret-too")
        again = await client.ask(heartbeat(0, "member"))
        assert {topic.topic_id for topic in again.assignment.topic_partitions} == assigned
