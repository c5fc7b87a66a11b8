"""Delegation tokens (KIP-48): decisions to create, renew, expire and remove them.

Principals are texts such as `User:alice`, as the records have them. The HMAC of a token, which is its password, follows
from its id and `delegation.token.secret.key`, and is in no record.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.rare_records import DelegationTokenRecord, RemoveDelegationTokenRecord
from penstock.protocol.errors import ApiError, ErrorCode

_USER_PREFIX: Final = "User:"
#: Bounds of what every node keeps in memory for a token.
RENEWERS_MAX: Final = 100
PRINCIPAL_BYTES_MAX: Final = 1_024
#: Expired tokens that one decision removes.
_SWEPT_MAX: Final = 1_000
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_000  # the end of the year 9999


class TokenLimits(NamedTuple):
    """How many tokens there may be, in the cluster and of one owner."""

    tokens_max: int
    per_owner_max: int


class TokenLifetimes(NamedTuple):
    """`expiry_ms`: until the token must be renewed; `max_ms`: how long it can be renewed at most."""

    max_ms: int
    expiry_ms: int


def create_token(
    image: ClusterImage,
    token_id: str,
    *,
    owner: str,
    requester: str,
    renewers: Sequence[str],
    max_lifetime_ms: int,
    lifetimes: TokenLifetimes,
    limits: TokenLimits,
    now_ms: int,
) -> Decision[DelegationTokenRecord]:
    """Raises ApiError. A lifetime that is not positive stands for the longest."""
    if not all(renewer.startswith(_USER_PREFIX) for renewer in renewers):
        raise ApiError(ErrorCode.invalid_principal_type, "Renewers must be of type User")
    if len(renewers) > RENEWERS_MAX:
        raise ApiError(ErrorCode.invalid_request, f"A token has at most {RENEWERS_MAX} renewers")
    if any(len(each.encode()) > PRINCIPAL_BYTES_MAX for each in (owner, *renewers)):
        raise ApiError(ErrorCode.invalid_request, f"A name has at most {PRINCIPAL_BYTES_MAX} bytes")
    _check_room(image, owner, limits)
    lifetime_ms = min(max_lifetime_ms, lifetimes.max_ms) if max_lifetime_ms > 0 else lifetimes.max_ms
    max_timestamp = min(now_ms + lifetime_ms, _TIMESTAMP_MS_MAX)
    record = DelegationTokenRecord(
        owner=owner,
        requester=requester,
        renewers=tuple(renewers),
        issue_timestamp=now_ms,
        max_timestamp=max_timestamp,
        expiration_timestamp=min(max_timestamp, now_ms + lifetimes.expiry_ms),
        token_id=token_id,
    )
    return Decision((record,), record)


def renew_token(
    image: ClusterImage,
    token_id: str | None,
    *,
    principal: str,
    period_ms: int,
    lifetimes: TokenLifetimes,
    now_ms: int,
) -> Decision[int]:
    """Reply with the time at which the token expires now. Raises ApiError."""
    token = _token(image, token_id)
    _check_not_expired(token, now_ms)
    _check_may_change(token, principal)
    period_ms = min(period_ms, lifetimes.expiry_ms) if period_ms > 0 else lifetimes.expiry_ms
    return _expires_at(token, now_ms + period_ms)


def expire_token(
    image: ClusterImage, token_id: str | None, *, principal: str, period_ms: int, now_ms: int
) -> Decision[int]:
    """Reply with the time at which the token expires now; a negative period removes it at once. Raises ApiError.

    As in Apache Kafka a token that has expired can be removed, but not changed.
    """
    token = _token(image, token_id)
    _check_may_change(token, principal)
    if period_ms < 0:
        return Decision((RemoveDelegationTokenRecord(token_id=token.token_id),), now_ms)
    _check_not_expired(token, now_ms)
    return _expires_at(token, now_ms + period_ms)


def remove_expired_tokens(image: ClusterImage, now_ms: int) -> Decision[int]:
    """Reply with the number of tokens that are removed."""
    expired = [
        token.token_id
        for token in image.security.tokens.values()
        if min(token.max_timestamp, token.expiration_timestamp) < now_ms
    ][:_SWEPT_MAX]
    return Decision(tuple(RemoveDelegationTokenRecord(token_id=each) for each in expired), len(expired))


def _check_room(image: ClusterImage, owner: str, limits: TokenLimits) -> None:
    """Every user may create tokens, so each has a bound: one user must not use up the tokens of all."""
    tokens = image.security.tokens
    if len(tokens) >= limits.tokens_max:
        raise ApiError(
            ErrorCode.policy_violation, f"The cluster has {limits.tokens_max} delegation tokens already"
        )
    if len(tokens) < limits.per_owner_max:
        return
    if sum(token.owner == owner for token in tokens.values()) >= limits.per_owner_max:
        raise ApiError(
            ErrorCode.policy_violation, f"{owner} has {limits.per_owner_max} delegation tokens already"
        )


def _token(image: ClusterImage, token_id: str | None) -> DelegationTokenRecord:
    token = None if token_id is None else image.security.tokens.get(token_id)
    if token is None:
        raise ApiError(ErrorCode.delegation_token_not_found)
    return token


def _check_not_expired(token: DelegationTokenRecord, now_ms: int) -> None:
    if min(token.max_timestamp, token.expiration_timestamp) < now_ms:
        raise ApiError(ErrorCode.delegation_token_expired)


def _check_may_change(token: DelegationTokenRecord, principal: str) -> None:
    if principal != token.owner and principal not in token.renewers:
        raise ApiError(ErrorCode.delegation_token_owner_mismatch)


def _expires_at(token: DelegationTokenRecord, at_ms: int) -> Decision[int]:
    record = DelegationTokenRecord(
        owner=token.owner,
        requester=token.requester,
        renewers=token.renewers,
        issue_timestamp=token.issue_timestamp,
        max_timestamp=token.max_timestamp,
        expiration_timestamp=min(at_ms, token.max_timestamp),
        token_id=token.token_id,
    )
    return Decision((record,), record.expiration_timestamp)
