"""Delegation tokens (KIP-48) at the active controller: what the requests about them share, and the removal of old ones.

A token is named in requests by its HMAC, which is its password. No record and no line of the audit trail has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.broker.network.audit import audit_change
from penstock.cluster.controller.delegation_tokens import TokenLifetimes, TokenLimits, remove_expired_tokens
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.cluster.controller.decision import Decision
    from penstock.cluster.image import ClusterImage

logger = logging.getLogger("penstock.controller")


def token_lifetimes(settings: NodeSettings) -> TokenLifetimes:
    return TokenLifetimes(
        max_ms=settings.integer("delegation.token.max.lifetime.ms"),
        expiry_ms=settings.integer("delegation.token.expiry.time.ms"),
    )


def token_limits(settings: NodeSettings) -> TokenLimits:
    return TokenLimits(
        tokens_max=settings.integer("penstock.delegation.tokens.max"),
        per_owner_max=settings.integer("penstock.delegation.tokens.per.owner.max"),
    )


def require_token_request(ctx: RequestContext) -> None:
    """Raises ApiError if the client may not ask about tokens, because it has not logged in or has with a token."""
    if not ctx.may_ask_about_tokens:
        raise ApiError(ErrorCode.delegation_token_request_not_allowed)


def require_tokens_enabled(ctx: RequestContext) -> None:
    if not ctx.services.token_hmacs.is_enabled:
        raise ApiError(ErrorCode.delegation_token_auth_disabled)


async def change_token(
    ctx: RequestContext,
    token_hmac: bytes,
    decide: Callable[[ClusterImage, str | None], Decision[int]],
    respond: Callable[[ErrorCode, datetime], Any],
) -> Any:
    """Renew or expire the token that has this HMAC. `decide` gets its id, or None if there is none.

    Raises NOT_CONTROLLER.
    """
    token_id: str | None = None

    def decide_by_id(image: ClusterImage) -> Decision[int]:
        nonlocal token_id
        token_id = ctx.services.token_hmacs.find(image.security.tokens.keys(), token_hmac)
        return decide(image, token_id)

    try:
        require_token_request(ctx)
        require_tokens_enabled(ctx)
        response = respond(ErrorCode.none, timestamp(await ctx.services.metadata.propose(decide_by_id)))
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        response = respond(error.code, timestamp(0))
    if ctx.authorizer is not None:
        audit_change(ctx, () if token_id is None else (token_id,), response)
    return response


def timestamp(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


class TokenSweeper:
    """Removes tokens that have expired, every `delegation.token.expiry.check.interval.ms`."""

    def __init__(self, settings: NodeSettings, metadata: MetadataLog) -> None:
        self._metadata = metadata
        self._interval_ms = settings.integer("delegation.token.expiry.check.interval.ms")
        self._next_ms = 0

    async def sweep(self, now_ms: int) -> None:
        """Raises ApiError. A clock that is set back does not delay the next look by more than an interval."""
        if self._next_ms - self._interval_ms <= now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._interval_ms
        if not remove_expired_tokens(self._metadata.image, now_ms).records:
            return
        removed = await self._metadata.propose(lambda image: remove_expired_tokens(image, now_ms))
        logger.info("delegation tokens have expired", extra={"tokens": removed})
        if remove_expired_tokens(self._metadata.image, now_ms).records:
            self._next_ms = now_ms  # one decision removes only so many
