"""Share consumers for campaigns: their settings, and rounds whose outcome is known."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import ShareConsumer
from kio.schema.errors import ErrorCode
from tests.chaos.view import Observer
from tests.chaos.workload import CLIENT
from tests.compat.raw import schema

SESSION_MS = "4000"  # share.session.timeout.ms of groups
STATE_TOPIC, STATE_SHARDS = "__share_group_state", 3
#: Members are missed, and locks run out, at a pace that a campaign can wait for.
NODE_SETTINGS = {
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "200",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "3",
    "share.coordinator.state.topic.num.partitions": str(STATE_SHARDS),
    "share.coordinator.state.topic.replication.factor": "3",
}


def share_consumer(servers: str, group: str, topic: str, settings: Mapping[str, Any] = CLIENT) -> Any:
    """It says what becomes of each record, one by one."""
    given = {"bootstrap.servers": servers, "group.id": group, "share.acknowledgement.mode": "explicit"}
    client = ShareConsumer({**settings, **given})
    client.subscribe([topic])
    return client


def stored_partitions(client: Any, timeout_s: float) -> set[int]:
    """Send what has been said of records; returns the partitions of which the broker has stored it.

    The others are unknown. Raises KafkaException if all are unknown.
    """
    return {place.partition for place, error in client.commit_sync(timeout_s).items() if error is None}


def lags(observer: Observer, group: str) -> dict[tuple[str, int], int]:
    """Of the partitions that the group has: how many records are not final yet. Empty while that is unknown."""
    api = "describe_share_group_offsets"
    asked = schema(api, 1, "DescribeShareGroupOffsetsRequestGroup")(group_id=group, topics=None)
    answers = observer.ask_each(schema(api, 1, "DescribeShareGroupOffsetsRequest")(groups=(asked,)))
    for answer in answers.values():
        (found,) = answer.groups
        if found.error_code is ErrorCode.none and found.topics:
            return {
                (topic.topic_name, part.partition_index): part.lag
                for topic in found.topics
                for part in topic.partitions
            }
    return {}
