"""The settings that decisions about brokers and leaders depend on."""

from penstock.cluster.effective import Layer
from penstock.cluster.guarantees import FLUSH, MIN_ISR, UNCLEAN, TopicGuarantees, topic_guarantees
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import ResourceType

_NAMES = (MIN_ISR, FLUSH, UNCLEAN)


class ControllerRules:
    """`node` is the node's layers, strongest first; make a new one when they change."""

    __slots__ = ("_known", "heartbeat_interval_ms", "node")

    def __init__(self, *, node: tuple[Layer, ...] = (), heartbeat_interval_ms: int = 2000) -> None:
        self.node = node
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self._known: dict[tuple[str | None, ...], TopicGuarantees] = {}

    def guarantees(self, image: ClusterImage, topic: str) -> TopicGuarantees:
        overrides = image.config(ResourceType.TOPIC, topic)
        key = tuple(map(overrides.get, _NAMES))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = topic_guarantees(overrides, self.node)
        return found

    def isr_min(self, image: ClusterImage, topic: str) -> int:
        """As set: rules cap it at the replicas that a partition has."""
        return self.guarantees(image, topic).isr_min

    def syncs_before_ack(self, image: ClusterImage, topic: str) -> bool:
        return self.guarantees(image, topic).syncs_before_ack

    def unclean_allowed(self, image: ClusterImage, topic: str) -> bool:
        return self.guarantees(image, topic).unclean_allowed
