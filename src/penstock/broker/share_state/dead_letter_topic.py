"""The topic that dead letters go to, made when the first one needs it, with its source's partitions and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.topic_creation import create_topics_in_cluster
from penstock.broker.topic_settings import node_layers
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.effective import effective_topic_setting
from penstock.cluster.names import is_internal
from penstock.cluster.state import ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.letters import dead_letter_retention_ms

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.state import TopicState

#: The headers of a dead letter come on top of the largest record of its source.
_HEADERS_BYTES_MAX: Final = 64 << 10
_MAX_BYTES: Final = "max.message.bytes"
_RETENTION_MS: Final = "retention.ms"


async def dead_letter_topic(node: Node, name: str, source: TopicState) -> TopicState:
    """Raises ApiError when it is not there and cannot be made."""
    if is_internal(name):
        raise ApiError(ErrorCode.invalid_topic_exception, f"{name} is an internal topic")
    if name == source.name:
        # The group would be given its own dead letters, and give them up again, for ever.
        raise ApiError(ErrorCode.invalid_topic_exception, f"{name} is where they are from")
    if name not in node.image.topics:
        (result,) = await create_topics_in_cluster(node, [_new_topic(node, name, source)])
        if result.error not in (ErrorCode.none, ErrorCode.topic_already_exists):
            raise ApiError(result.error, result.message)
    found = node.image.topics.get(name)
    if found is None:
        raise ApiError(ErrorCode.leader_not_available, f"{name} is being made")
    return found


def largest_batch_bytes(node: Node, name: str) -> int:
    """What a topic takes at once."""
    return _number(node, name, _MAX_BYTES)


def _number(node: Node, name: str, setting: str) -> int:
    """A setting of a topic, as it is in force."""
    own = node.image.config(ResourceType.TOPIC, name)
    found = effective_topic_setting(setting, own, node_layers(node.settings, node.image)).value
    assert isinstance(found, int)
    return found


def _new_topic(node: Node, name: str, source: TopicState) -> NewTopic:
    replicas = min(len(partition.replicas) for partition in source.partitions.values())
    largest = largest_batch_bytes(node, source.name) + _HEADERS_BYTES_MAX
    kept_ms = dead_letter_retention_ms(_number(node, source.name, _RETENTION_MS))
    return NewTopic(
        name=name,
        partitions=len(source.partitions),
        replication_factor=min(replicas, len(node.image.brokers)),  # those that are down will be back
        configs=((_MAX_BYTES, str(largest)), (_RETENTION_MS, str(kept_ms))),
    )
