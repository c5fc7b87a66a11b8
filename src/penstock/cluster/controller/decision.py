"""What a decision depends on, and what it returns.

`ControllerConfig` holds the settings that decisions about brokers and leaders depend on. A `Decision` holds the records
to append and replay, and the reply that is due once that is done. Decisions about many elements of a client's request
are made in steps.
"""

from typing import Generic, NamedTuple, TypeVar

from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import MetadataRecord
from penstock.cluster.topic_settings import (
    FLUSH_POLICY,
    MIN_ISR,
    UNCLEAN_ELECTION,
    ConfigLayer,
    TopicGuarantees,
    topic_guarantees,
)
from penstock.protocol.steps import Steps

Reply = TypeVar("Reply", covariant=True)


class UncleanElection(NamedTuple):
    """A new leader that may lack acknowledged records. A decision always reports it."""

    topic: str
    partition: int
    old_leader: int  # -1 when there was none
    leader: int
    leader_epoch: int  # the one that begins


class Decision(NamedTuple, Generic[Reply]):
    """Takes effect as a whole or not at all; without records there is nothing to append."""

    records: tuple[MetadataRecord, ...]
    reply: Reply
    unclean: tuple[UncleanElection, ...] = ()


DecisionOrSteps = Decision[Reply] | Steps[Decision[Reply]]

_PROMISE_SETTINGS = (MIN_ISR, FLUSH_POLICY, UNCLEAN_ELECTION)


class ControllerConfig:
    """`node` is the node's layers, strongest first. Create a new instance when they change: results are cached."""

    __slots__ = ("_known", "heartbeat_interval_ms", "node")

    def __init__(self, *, node: tuple[ConfigLayer, ...] = (), heartbeat_interval_ms: int = 2000) -> None:
        self.node = node
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self._known: dict[tuple[str | None, ...], TopicGuarantees] = {}

    def guarantees(self, image: ClusterImage, topic: str) -> TopicGuarantees:
        overrides = image.config(ResourceType.TOPIC, topic)
        key = tuple(map(overrides.get, _PROMISE_SETTINGS))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = topic_guarantees(overrides, self.node)
        return found

    def isr_min(self, image: ClusterImage, topic: str) -> int:
        """Returns the configured value, which may exceed the number of replicas; callers cap it."""
        return self.guarantees(image, topic).isr_min

    def syncs_before_ack(self, image: ClusterImage, topic: str) -> bool:
        return self.guarantees(image, topic).syncs_before_ack

    def unclean_allowed(self, image: ClusterImage, topic: str) -> bool:
        return self.guarantees(image, topic).unclean_allowed
