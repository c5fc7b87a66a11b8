"""Feature levels: what the cluster as a whole promises, raised only when every broker can keep it."""

from collections.abc import Mapping
from typing import Final

from penstock.cluster.decision import Decision
from penstock.cluster.guarantees import MIN_ISR
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import ConfigRecord, FeatureLevelRecord
from penstock.cluster.state import ResourceType
from penstock.cluster.wire import MetadataRecord
from penstock.protocol.errors import ApiError, ErrorCode

ELIGIBLE_LEADER_REPLICAS: Final = "eligible.leader.replicas.version"


def set_feature_levels(
    image: ClusterImage, levels: Mapping[str, int], *, isr_min: str | None = None
) -> Decision[None]:
    """Level 0 removes a feature. Raises INVALID_UPDATE_VERSION when a registered broker lacks the level.

    With eligible leader replicas all brokers have to go by one min.insync.replicas: `isr_min`, what was given to the
    node that decides, becomes the whole cluster's, unless the cluster has one.
    """
    for name, level in levels.items():
        _refuse_unsupported(image, name, level)
    records: list[MetadataRecord] = [
        FeatureLevelRecord(name=name, feature_level=level)
        for name, level in sorted(levels.items())
        if image.features.get(name, 0) != level
    ]
    begins = levels.get(ELIGIBLE_LEADER_REPLICAS, 0) > image.features.get(ELIGIBLE_LEADER_REPLICAS, 0)
    if begins and isr_min is not None and MIN_ISR not in image.config(ResourceType.BROKER, ""):
        records.append(
            ConfigRecord(resource_type=ResourceType.BROKER, resource_name="", name=MIN_ISR, value=isr_min)
        )
    return Decision(tuple(records), None)


def _refuse_unsupported(image: ClusterImage, name: str, level: int) -> None:
    for broker in image.brokers.values():
        lowest, highest = broker.features.get(name, (0, 0))
        if level and not lowest <= level <= highest:
            raise ApiError(
                ErrorCode.invalid_update_version,
                f"Invalid update version {level} for feature {name}. Broker {broker.id} only supports "
                f"versions {lowest}-{highest}",
            )
