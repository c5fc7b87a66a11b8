"""Feature levels: what the cluster as a whole promises, raised only when every broker can keep it."""

from collections.abc import Mapping

from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import FeatureLevelRecord
from penstock.protocol.errors import ApiError, ErrorCode


def set_feature_levels(image: ClusterImage, levels: Mapping[str, int]) -> Decision[None]:
    """Level 0 removes a feature. Raises INVALID_UPDATE_VERSION when a registered broker lacks the level."""
    for name, level in levels.items():
        _refuse_unsupported(image, name, level)
    records = tuple(
        FeatureLevelRecord(name=name, feature_level=level)
        for name, level in sorted(levels.items())
        if image.features.get(name, 0) != level
    )
    return Decision(records, None)


def _refuse_unsupported(image: ClusterImage, name: str, level: int) -> None:
    for broker in image.brokers.values():
        lowest, highest = broker.features.get(name, (0, 0))
        if level and not lowest <= level <= highest:
            raise ApiError(
                ErrorCode.invalid_update_version,
                f"Invalid update version {level} for feature {name}. Broker {broker.id} only supports "
                f"versions {lowest}-{highest}",
            )
