"""Creating topics on behalf of this node: its rules, its randomness, through the metadata log."""

from __future__ import annotations

import random
from collections.abc import Sequence
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

if TYPE_CHECKING:
    from penstock.broker.node import Node

_CHANCE = Chance(draw=random.randrange, fresh_id=uuid4)


async def create_topics_in_cluster(
    node: Node, topics: Sequence[NewTopic], *, validate_only: bool = False
) -> tuple[TopicResult, ...]:
    """Returns once the topics can be written to. Raises ApiError when the metadata log cannot be written."""
    return await node.metadata.propose(
        lambda image: create_topics(
            image, topics, rules=_rules(node), chance=_CHANCE, validate_only=validate_only
        )
    )


def _rules(node: Node) -> TopicRules:
    layers = node_layers(node.settings, node.image)
    return TopicRules(
        partitions=node_integer(layers, "num.partitions"),
        replication_factor=node_integer(layers, "default.replication.factor"),
        partitions_max=node_integer(layers, "penstock.create.topics.partitions.max"),
        node=layers,
    )
