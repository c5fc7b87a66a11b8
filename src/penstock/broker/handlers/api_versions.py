"""ApiVersions (key 18), v0-4. The reply's header never turns flexible; an unknown version gets v0 and the list.

A node that is controller only does not list what needs partitions. Who asks for it nevertheless is told that they are
elsewhere. Requests that only nodes send are listed only on the listener for nodes, and those of client metrics only
where a subscription is defined: a client that is offered them asks at once, and again every few minutes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.broker.apis import ADVERTISED_MIN, APIS
from penstock.broker.context import RequestContext
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.broker.node import Node

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
#: Of what is kept of a client's name and version.
_SOFTWARE_CHARS_MAX = 255
#: Versions below this one cannot express that a feature starts at level 0.
_LEVEL_ZERO_FROM = 4
#: GetTelemetrySubscriptions, PushTelemetry.
_CLIENT_METRICS = frozenset({71, 72})


def handle(ctx: RequestContext, request: Any) -> Any:
    is_named = ctx.version < 3 or _names_its_software(request)
    error = ErrorCode.none if is_named else ErrorCode.invalid_request
    if ctx.connection is not None and ctx.version >= 3 and is_named:
        # Client metrics subscriptions can choose clients by it.
        ctx.connection.software = (
            request.client_software_name[:_SOFTWARE_CHARS_MAX],
            request.client_software_version[:_SOFTWARE_CHARS_MAX],
        )
    for_nodes = ctx.connection is not None and ctx.connection.for_nodes
    return _response(ctx.node, ctx.version, error, for_nodes=for_nodes)


def unsupported_version(node: Node, *, for_nodes: bool) -> Any:
    return _response(node, 0, ErrorCode.unsupported_version, for_nodes=for_nodes)


def _names_its_software(request: Any) -> bool:
    return bool(
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    )


def _response(node: Node, version: int, error: ErrorCode, *, for_nodes: bool) -> Any:
    from datetime import timedelta

    response = schema_class("api_versions.v4.response:ApiVersionsResponse")
    api = schema_class("api_versions.v4.response:ApiVersion")
    supported = schema_class("api_versions.v4.response:SupportedFeatureKey")
    finalized = schema_class("api_versions.v4.response:FinalizedFeatureKey")
    features = node.features()
    wants_metrics = node.telemetry.has_subscriptions
    return response(
        error_code=error,
        api_keys=tuple(
            api(api_key=a.key, min_version=ADVERTISED_MIN.get(a.key, a.min_version), max_version=max_version)
            for a in APIS.values()
            if node.settings.is_broker or not a.broker_only
            if a.key not in _CLIENT_METRICS or wants_metrics
            if (max_version := a.max_version_on(for_nodes=for_nodes)) >= a.min_version
        ),
        throttle_time=timedelta(0),
        supported_features=tuple(
            supported(name=f.name, min_version=f.level_min, max_version=f.level_max)
            for f in features
            if version >= _LEVEL_ZERO_FROM or f.level_min > 0
        ),
        finalized_features_epoch=node.metadata.committed_offset,
        finalized_features=tuple(
            finalized(name=f.name, max_version_level=f.level, min_version_level=f.level) for f in features
        ),
    )
