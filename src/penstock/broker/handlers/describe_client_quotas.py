"""DescribeClientQuotas (key 48), v0-1. Quotas whose entity matches every component of the filter.

A component matches an exact name, the default, or any name and the default. A strict filter leaves out entities that
have parts without a component.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_client_quotas.v1.response import (
    DescribeClientQuotasResponse,
    EntityData,
    EntryData,
    ValueData,
)

from penstock.broker.network.requests import RequestContext
from penstock.protocol.acls import canonical_host
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.quota_entities import canonical_entity

_EXACT, _DEFAULT, _SPECIFIED = 0, 1, 2
_ENTITY_TYPES: Final = frozenset({"user", "client-id", "ip"})


def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        components = _components(request)
    except ApiError as error:
        return DescribeClientQuotasResponse(
            throttle_time=timedelta(0), error_code=error.code, error_message=error.message, entries=None
        )
    return DescribeClientQuotasResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        error_message=None,
        entries=tuple(
            EntryData(
                entity=tuple(EntityData(entity_type=kind, entity_name=name) for kind, name in key),
                values=tuple(ValueData(key=name, value=value) for name, value in limits.items()),
            )
            for key, limits in ctx.services.image.security.quotas.items()
            if _matches(dict(canonical_entity(key)), components, is_strict=request.strict)
        ),
    )


def _components(request: Any) -> dict[str, tuple[int, str | None]]:
    """Raises ApiError."""
    components: dict[str, tuple[int, str | None]] = {}
    for component in request.components:
        kind, match_type, match = component.entity_type, component.match_type, component.match
        if kind not in _ENTITY_TYPES:
            code = ErrorCode.invalid_request if not kind else ErrorCode.unsupported_version
            raise ApiError(code, f"Custom entity type '{kind}' not supported")
        if kind in components:
            raise ApiError(ErrorCode.invalid_request, f"Entity type {kind} cannot appear more than once.")
        if match_type not in (_EXACT, _DEFAULT, _SPECIFIED):
            raise ApiError(ErrorCode.invalid_request, f"Unknown match type {match_type}")
        if (match is not None) != (match_type == _EXACT):
            problem = "needs a name" if match_type == _EXACT else "takes no name"
            raise ApiError(ErrorCode.invalid_request, f"Match type {match_type} of {kind} {problem}.")
        if kind == "ip" and match is not None:
            match = canonical_host(match)
        components[kind] = (match_type, match)
    if "ip" in components and len(components) > 1:
        raise ApiError(
            ErrorCode.invalid_request,
            "Invalid entity filter component combination: an IP has no user and no client id",
        )
    return components


def _matches(
    entity: Mapping[str, str | None], components: Mapping[str, tuple[int, str | None]], *, is_strict: bool
) -> bool:
    if is_strict and len(entity) != len(components):
        return False
    for kind, (match_type, match) in components.items():
        if kind not in entity:
            return False
        if match_type == _EXACT and entity[kind] != match:
            return False
        if match_type == _DEFAULT and entity[kind] is not None:
            return False
    return True
