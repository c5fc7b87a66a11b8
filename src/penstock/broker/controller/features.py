"""The features of a cluster that this release supports, and their levels (KIP-584)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.cluster.controller.brokers import ELIGIBLE_LEADER_REPLICAS, set_feature_levels
from penstock.cluster.controller.decision import Decision
from penstock.cluster.topic_settings import MIN_ISR

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.cluster.image import ClusterImage


class SupportedFeature(NamedTuple):
    """`level` is the level of the cluster now. A supported level is added only once it is implemented."""

    name: str
    level_min: int
    level_max: int
    level: int = 0


#: The controller writes the record formats of metadata.version 23 (Kafka 4.0-IV1). The other features are transactions
#: that bump epochs, the server-side consumer protocol, share groups and streams groups. Eligible leader replicas
#: (KIP-966) are always maintained and cannot be switched off.
SUPPORTED_FEATURES: Final = (
    SupportedFeature("metadata.version", 23, 23),
    SupportedFeature(ELIGIBLE_LEADER_REPLICAS, 1, 1),
    SupportedFeature("transaction.version", 0, 2),
    SupportedFeature("group.version", 0, 1),
    SupportedFeature("share.version", 0, 1),
    SupportedFeature("streams.version", 0, 1),
)


def feature_levels(image: ClusterImage) -> list[SupportedFeature]:
    """Return the supported features with the levels that the cluster has now."""
    return [
        feature._replace(level=max(feature.level_min, image.features.get(feature.name, 0)))
        for feature in SUPPORTED_FEATURES
    ]


def with_feature_levels(
    settings: NodeSettings, image: ClusterImage, joined: Decision[int], *, raise_them: bool
) -> Decision[int]:
    """The first broker sets the cluster's feature levels; later only `raise_them` or UpdateFeatures changes them."""
    if image.features and not raise_them:
        return joined
    after = image.fork()
    after.apply(joined.records)
    wanted = {f.name: f.level_max for f in SUPPORTED_FEATURES}
    levels = set_feature_levels(after, wanted, isr_min=configured_isr_min(settings))
    return Decision((*joined.records, *levels.records), joined.reply, joined.unclean)


def configured_isr_min(settings: NodeSettings) -> str | None:
    """Return the min.insync.replicas that this node was started with; None if it was not set."""
    return str(settings.integer(MIN_ISR)) if MIN_ISR in settings.origins else None
