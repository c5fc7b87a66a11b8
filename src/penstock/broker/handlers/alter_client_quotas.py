"""AlterClientQuotas (key 49), v0-1. Each entity has a result of its own; the controller serves it.

An operation that is named twice for one entity is refused, and so is an entity that is named twice.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from kio.schema.alter_client_quotas.v1.response import AlterClientQuotasResponse, EntityData, EntryData

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.client_quotas import QuotaAlteration, QuotaResult, alter_client_quotas
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.quota_entities import canonical_entity
from penstock.protocol.steps import Steps


async def handle(ctx: RequestContext, request: Any) -> Any:
    alterations = await ctx.mapped(_alteration, request.entries)
    named = Counter(frozenset(canonical_entity(each.entity)) for each in alterations)
    if any(count > 1 for count in named.values()):
        raise ApiError(ErrorCode.invalid_request, "A quota entity is named twice.")

    def decide(image: ClusterImage) -> Steps[Decision[tuple[QuotaResult, ...]]]:
        decision = yield from alter_client_quotas(image, alterations)
        return Decision((), decision.reply) if request.validate_only else decision

    results = await ctx.services.metadata.propose(decide)
    return AlterClientQuotasResponse(
        throttle_time=timedelta(0),
        entries=await ctx.mapped(_entry, results),
    )


def _entry(result: QuotaResult) -> EntryData:
    return EntryData(
        error_code=result.error,
        error_message=result.message,
        entity=tuple(EntityData(entity_type=kind, entity_name=name) for kind, name in result.entity),
    )


def _alteration(entry: Any) -> QuotaAlteration:
    limits: dict[str, float | None] = {}
    for op in entry.ops:
        if op.key in limits:
            raise ApiError(ErrorCode.invalid_request, f"{op.key} is named twice for one quota entity.")
        limits[op.key] = None if op.remove else op.value
    return QuotaAlteration(tuple((part.entity_type, part.entity_name) for part in entry.entity), limits)
