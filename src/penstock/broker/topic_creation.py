"""Creating topics on behalf of this node: its rules, its randomness, through the metadata log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from penstock.broker.topic_settings import node_integer, node_layers
from penstock.cluster.controller.create_topics import (
    Chance,
    NewTopic,
    TopicResult,
    TopicRules,
    create_topics,
)
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node

_CHANCE = Chance(draw=random.randrange, fresh_id=uuid4)


async def create_topics_in_cluster(
    node: Node, topics: Sequence[NewTopic], *, validate_only: bool = False
) -> tuple[TopicResult, ...]:
    """Returns once the topics can be written to. Raises ApiError when the metadata log cannot be written."""
    results = await node.metadata.propose(
        lambda image: create_topics(
            image, topics, rules=_rules(node), chance=_CHANCE, validate_only=validate_only
        )
    )
    without_room = {topic for topic, _ in node.partitions.refused}
    return tuple(_no_room(result) if result.name in without_room else result for result in results)


def _no_room(result: TopicResult) -> TopicResult:
    """The topic exists from now on, and the node keeps trying; whoever asked should know nevertheless."""
    if result.error is not ErrorCode.none:
        return result
    message = "the topic was created, but the disk refuses its partitions; they follow once it does not"
    return replace(result, error=ErrorCode.kafka_storage_error, message=message)


def _rules(node: Node) -> TopicRules:
    layers = node_layers(node.settings, node.image)
    return TopicRules(
        partitions=node_integer(layers, "num.partitions"),
        replication_factor=node_integer(layers, "default.replication.factor"),
        partitions_max=node_integer(layers, "penstock.create.topics.partitions.max"),
        node=layers,
    )
