"""ApiVersions (key 18), v0-4. The reply header is never flexible; an unknown version gets a v0 reply with the list.

A node that is only a controller does not list APIs that need partitions; a client that sends one anyway gets an error
which says that the partitions are on other nodes. Inter-broker APIs are listed only on the listeners that serve them.
The APIs of client metrics are listed only if a subscription is defined, because a client that sees them uses them at
once, and again every few minutes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.broker.controller.features import feature_levels
from penstock.broker.network.apis import ADVERTISED_MIN_VERSIONS, APIS
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.broker.network.node_principals import NodePrincipals
    from penstock.broker.services import BrokerServices

_SOFTWARE_NAME = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
#: A client's software name and version are truncated to this length.
_SOFTWARE_CHARS_MAX = 255
#: Versions below this one cannot express that a feature starts at level 0.
_LEVEL_ZERO_FROM = 4
#: GetTelemetrySubscriptions, PushTelemetry.
_CLIENT_METRICS = frozenset({71, 72})


def handle(ctx: RequestContext, request: Any) -> Any:
    nodes = None if ctx.connection is None else ctx.connection.nodes
    api = APIS[ctx.api_key]
    if not api.min_version <= ctx.version <= api.max_version:
        return _response(ctx.services, 0, ErrorCode.unsupported_version, nodes)
    is_named = ctx.version < 3 or _has_valid_software(request)
    error = ErrorCode.none if is_named else ErrorCode.invalid_request
    if ctx.connection is not None and ctx.version >= 3 and is_named:
        # Client metrics subscriptions can select clients by software name and version.
        ctx.connection.software = (
            request.client_software_name[:_SOFTWARE_CHARS_MAX],
            request.client_software_version[:_SOFTWARE_CHARS_MAX],
        )
    return _response(ctx.services, ctx.version, error, nodes)


def _has_valid_software(request: Any) -> bool:
    return bool(
        _SOFTWARE_NAME.fullmatch(request.client_software_name)
        and _SOFTWARE_NAME.fullmatch(request.client_software_version)
    )


def _response(services: BrokerServices, version: int, error: ErrorCode, nodes: NodePrincipals | None) -> Any:
    """`nodes` is None on listeners for clients."""
    from datetime import timedelta

    is_inter_broker, serves_controller = nodes is not None, nodes is not None and nodes.serves_controller

    response = schema_class("api_versions.v4.response:ApiVersionsResponse")
    api = schema_class("api_versions.v4.response:ApiVersion")
    supported = schema_class("api_versions.v4.response:SupportedFeatureKey")
    finalized = schema_class("api_versions.v4.response:FinalizedFeatureKey")
    features = feature_levels(services.image)
    wants_metrics = services.telemetry.has_subscriptions
    return response(
        error_code=error,
        api_keys=tuple(
            api(
                api_key=a.key,
                min_version=ADVERTISED_MIN_VERSIONS.get(a.key, a.min_version),
                max_version=max_version,
            )
            for a in APIS.values()
            if services.settings.is_broker or not a.broker_only
            if a.key not in _CLIENT_METRICS or wants_metrics
            if (
                max_version := a.max_version_on(
                    is_inter_broker=is_inter_broker, serves_controller=serves_controller
                )
            )
            >= a.min_version
        ),
        throttle_time=timedelta(0),
        supported_features=tuple(
            supported(name=f.name, min_version=f.level_min, max_version=f.level_max)
            for f in features
            if version >= _LEVEL_ZERO_FROM or f.level_min > 0
        ),
        finalized_features_epoch=services.metadata.committed_offset,
        finalized_features=tuple(
            finalized(name=f.name, max_version_level=f.level, min_version_level=f.level) for f in features
        ),
    )
