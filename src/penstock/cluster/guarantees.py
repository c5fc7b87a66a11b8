"""What a topic's settings promise of its partitions; leaders and the controller have to read them alike."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from penstock.cluster.effective import NO_NODE, Layer, effective_topic_setting
from penstock.cluster.state import PartitionState

MIN_ISR: Final = "min.insync.replicas"
FLUSH: Final = "penstock.flush"
UNCLEAN: Final = "unclean.leader.election.enable"


class TopicGuarantees(NamedTuple):
    isr_min: int
    #: A replica is counted only for what it has synced, so an unclean stop takes nothing it was counted for.
    syncs_before_ack: bool
    unclean_allowed: bool


def topic_guarantees(overrides: Mapping[str, str], node: Iterable[Layer] = NO_NODE) -> TopicGuarantees:
    layers = tuple(node)
    isr_min, flush, unclean = (
        effective_topic_setting(name, overrides, layers).value for name in (MIN_ISR, FLUSH, UNCLEAN)
    )
    assert isinstance(isr_min, int)
    return TopicGuarantees(isr_min, flush == "ack", bool(unclean))


def effective_isr_min(isr_min: int, partition: PartitionState) -> int:
    """No more than there are replicas; those that a reassignment is still filling are not asked for yet."""
    return max(
        capped_isr_min(isr_min, len(partition.replicas), len(partition.adding_replicas)), isr_floor(partition)
    )


def isr_floor(partition: PartitionState) -> int:
    """While others may be elected because nothing goes on without them, nothing does, whatever the settings say.

    A node may read another minimum from its own file than the controller does from its.
    """
    return len(partition.isr) + 1 if partition.elr else 1


def capped_isr_min(isr_min: int, replicas: int, adding: int) -> int:
    return max(1, min(isr_min, replicas - adding))
