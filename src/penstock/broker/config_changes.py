"""Changing settings, by the active controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.broker.settings_table import NODE_SETTINGS
from penstock.broker.topic_settings import node_layers
from penstock.cluster.controller.alter_configs import AlterResource, AlterResult, ConfigRules
from penstock.cluster.decision import Decision

if TYPE_CHECKING:
    from penstock.broker.node import Node

Alter = Callable[..., Decision[tuple[AlterResult, ...]]]


async def alter_in_cluster(
    node: Node, alter: Alter, resources: Sequence[AlterResource], validate_only: bool
) -> tuple[AlterResult, ...]:
    rules = ConfigRules(node_settings=NODE_SETTINGS, node=node_layers(node.settings, node.image))
    return await node.controller.propose(
        lambda image: alter(image, resources, rules=rules, validate_only=validate_only)
    )
