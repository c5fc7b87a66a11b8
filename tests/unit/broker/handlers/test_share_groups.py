"""ShareGroupHeartbeat on the wire: how many topics a member may subscribe to."""

from pathlib import Path
from typing import Any

from kio.schema.share_group_heartbeat.v1.request import ShareGroupHeartbeatRequest
from tests.unit.broker.raw_client import running
from tests.unit.broker.wire_client import WireClient

from penstock.protocol.errors import ErrorCode

TOPICS_MAX = 5000


async def test_a_member_subscribes_to_a_bounded_number_of_topics(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)

        async def join(member: str, topics: int) -> Any:
            names = tuple(f"t{number}" for number in range(topics))
            return await client.ask(
                ShareGroupHeartbeatRequest(
                    group_id="g", member_id=member, member_epoch=0, rack_id=None, subscribed_topic_names=names
                )
            )

        assert (await join("many", TOPICS_MAX)).error_code is ErrorCode.none
        refused = await join("more", TOPICS_MAX + 1)
        assert refused.error_code is ErrorCode.invalid_request
        assert "at most 5000 topics" in refused.error_message
        # It has not become a member.
        groups = [group for shard in node.groups.loaded_shards() for group in shard.groups.values()]
        assert [group.members.keys() for group in groups] == [{"many"}]
        await client.close()
