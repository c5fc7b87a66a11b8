"""Leader balancing on the active controller.

It moves leadership back to the preferred replicas, elects leaders where a changed setting now allows it, and raises the
replication factor of internal topics when brokers have joined.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.config.internal_topics import INTERNAL_TOPICS
from penstock.cluster.controller.elect_leaders import (
    balance_leaders,
    elect_leaderless_partitions,
    raise_internal_topic_replicas,
)
from penstock.cluster.controller.partition_change import all_partitions
from penstock.cluster.image import ClusterImage

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.controller.controller import Controller
    from penstock.broker.environment import ImageView

logger = logging.getLogger("penstock.controller")

#: Partitions that change in one decision; the clients of each have to find its new leader.
_BATCH: Final = 200
#: How long a broker must be active before it gets leaders: one that has just joined may soon leave again.
_BROKER_SETTLE_MS: Final = 2000


class _Incarnation(NamedTuple):
    broker: int
    epoch: int


class LeaderBalancer:
    def __init__(self, settings: NodeSettings, metadata: ImageView, controller: Controller) -> None:
        self._metadata = metadata
        self._controller = controller
        self._balances = settings.boolean("auto.leader.rebalance.enable")
        self._interval_ms = settings.integer("leader.imbalance.check.interval.seconds") * 1000
        self._percentage_max = settings.integer("leader.imbalance.per.broker.percentage")
        self._internal_replicas = {
            topic.name: settings.integer(topic.replication_factor) for topic in INTERNAL_TOPICS.values()
        }
        #: Since when the brokers are active that have not got their leaders back.
        self._coming: dict[_Incarnation, int] = {}
        self._settled: set[_Incarnation] = set()
        self._due_ms: int | None = None
        self._seen: ClusterImage | None = None

    async def look(self, now_ms: int) -> None:
        image = self._metadata.image
        if image is not self._seen:
            await self._elect_where_allowed()
            self._seen = image
        settling = self._settling(image, now_ms)
        if settling:
            await self._receive(image, settling)
        if self._due_ms is None:
            self._due_ms = now_ms + self._interval_ms
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + self._interval_ms
            if self._balances and is_imbalanced(image, self._percentage_max):
                await self._balance()

    async def _elect_where_allowed(self) -> None:
        """Retry elections of leaderless partitions: a changed setting may allow now what was refused before."""
        await self._controller.propose_if_needed(
            lambda image: elect_leaderless_partitions(
                image, rules=self._controller.rules(), partitions_max=_BATCH
            )
        )

    def _settling(self, image: ClusterImage, now_ms: int) -> list[_Incarnation]:
        """Return the brokers that joined a while ago and have not got their leaders back yet."""
        active = {_Incarnation(broker.id, broker.epoch) for broker in image.active_brokers()}
        self._settled &= active
        coming = active - self._settled
        self._coming = {each: self._coming.get(each, now_ms) for each in coming}
        return [each for each, since_ms in self._coming.items() if now_ms - since_ms >= _BROKER_SETTLE_MS]

    async def _receive(self, image: ClusterImage, settling: list[_Incarnation]) -> None:
        await self._raise_internal_topics()
        lagging = _lagging(image)
        complete = [each for each in settling if each.broker not in lagging]
        if complete and (not self._balances or await self._balance() < _BATCH):
            self._settled.update(complete)

    async def _raise_internal_topics(self) -> None:
        raised = await self._controller.propose_if_needed(
            lambda image: raise_internal_topic_replicas(
                image, self._internal_replicas, rules=self._controller.rules(), partitions_max=_BATCH
            )
        )
        if raised:
            logger.info("internal topics get more replicas", extra={"partitions": raised})

    async def _balance(self) -> int:
        moved = await self._controller.propose_if_needed(
            lambda image: balance_leaders(image, rules=self._controller.rules(), partitions_max=_BATCH)
        )
        if moved:
            logger.info("leaders moved to their preferred replicas", extra={"partitions": moved})
        return moved


def is_imbalanced(image: ClusterImage, percentage_max: int) -> bool:
    """Whether others lead more than this percentage of the partitions for which some broker is preferred."""
    own: Counter[int] = Counter()
    led_by_others: Counter[int] = Counter()
    for _, _, partition in all_partitions(image):
        preferred = partition.replicas[0]
        own[preferred] += 1
        led_by_others[preferred] += partition.leader != preferred
    return any(100 * led_by_others[broker] > percentage_max * count for broker, count in own.items())


def _lagging(image: ClusterImage) -> set[int]:
    """Return the brokers with a replica that is not in sync; replicas that a reassignment is adding do not count."""
    return {
        replica
        for _, _, partition in all_partitions(image)
        if len(partition.isr) < len(partition.replicas)
        for replica in partition.replicas
        if replica not in partition.isr and replica not in partition.adding_replicas
    }
