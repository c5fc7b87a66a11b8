"""UpdateFeatures (key 57), v0-2. Changes feature levels of the whole cluster, all of them or none.

Level 0 removes a feature. Before v2 each feature has its own result, with the same error. A level below the present
one must be requested as a downgrade.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from penstock.broker.controller.features import configured_isr_min, feature_levels
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.brokers import set_feature_levels
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class

_UPGRADE: Final = 1
_ONE_RESULT_FROM: Final = 2


async def handle(ctx: RequestContext, request: Any) -> Any:
    def decide(image: ClusterImage) -> Decision[None]:
        wanted = _requested_levels(ctx, image, request)
        decision = set_feature_levels(image, wanted, isr_min=configured_isr_min(ctx.services.settings))
        return Decision((), None) if request.validate_only else decision

    await ctx.services.metadata.propose(decide)
    return _response(ctx, request)


def _requested_levels(ctx: RequestContext, image: ClusterImage, request: Any) -> dict[str, int]:
    """Raises INVALID_UPDATE_VERSION, INVALID_REQUEST."""
    supported = {feature.name: feature for feature in feature_levels(ctx.services.image)}
    levels: dict[str, int] = {}
    for update in request.feature_updates:
        name, level = update.feature, update.max_version_level
        if name in levels:
            raise ApiError(ErrorCode.invalid_request, f"Feature {name} is named twice.")
        feature = supported.get(name)
        if feature is None or not feature.level_min <= level <= feature.level_max:
            raise ApiError(
                ErrorCode.invalid_update_version,
                f"Invalid update version {level} for feature {name}. The controller does not support it.",
            )
        if level < image.features.get(name, 0) and update.upgrade_type == _UPGRADE:
            raise ApiError(
                ErrorCode.invalid_update_version,
                f"Invalid update version {level} for feature {name}. "
                "Can't downgrade the version of this feature without setting the upgrade type to downgrade.",
            )
        levels[name] = level
    return levels


def _response(ctx: RequestContext, request: Any) -> Any:
    if ctx.version >= _ONE_RESULT_FROM:
        return schema_class("update_features.v2.response:UpdateFeaturesResponse")(
            throttle_time=timedelta(0), error_code=ErrorCode.none, error_message=None
        )
    result = schema_class("update_features.v1.response:UpdatableFeatureResult")
    return schema_class("update_features.v1.response:UpdateFeaturesResponse")(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        error_message=None,
        results=tuple(
            result(feature=update.feature, error_code=ErrorCode.none, error_message=None)
            for update in request.feature_updates
        ),
    )
