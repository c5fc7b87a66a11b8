"""Delegation tokens (KIP-48): creates, lists, renews and expires them.

The client must have logged in, and not with a token. Id and HMAC of a token are the user name and the password of a
SCRAM login with `penstock.sasl.tokenauth=true`, or `tokenauth=true` in `sasl.jaas.config`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.schemas import schema_class

_MILLISECOND = timedelta(milliseconds=1)
#: Stands for the longest lifetime, or the longest period, that the cluster allows.
LONGEST = -1
#: For `expire_token`: remove it at once.
AT_ONCE = -1


class DelegationToken(NamedTuple):
    """`hmac` is the password, in base 64. Times are milliseconds since 1970."""

    token_id: str
    owner: str
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    expires_ms: int
    max_ms: int
    hmac: str

    def __repr__(self) -> str:
        return f"DelegationToken({self.token_id!r} of {self.owner})"


def create_token(
    cluster: Cluster,
    *,
    owner: str | None = None,
    renewers: Sequence[str] = (),
    max_lifetime_ms: int = LONGEST,
) -> DelegationToken:
    """Create a token of this client's principal, or of another `owner`, such as User:alice.

    Raises Refused, Unavailable; ValueError for a principal that is not TYPE:NAME.
    """
    path = "create_delegation_token.v3.request"
    renewer = schema_class(f"{path}:CreatableRenewers")
    owner_type, owner_name = (None, None) if owner is None else _principal(owner)
    request = schema_class(f"{path}:CreateDelegationTokenRequest")(
        owner_principal_type=owner_type,
        owner_principal_name=owner_name,
        renewers=tuple(
            renewer(principal_type=kind, principal_name=name) for kind, name in map(_principal, renewers)
        ),
        max_lifetime=max_lifetime_ms * _MILLISECOND,
    )
    # Before version 3 the owner would be left out.
    oldest = 0 if owner is None else 3

    def ask(connection: Connection) -> DelegationToken:
        response = connection.call(request, oldest=oldest)
        created_for = f"{response.principal_type}:{response.principal_name}"
        raise_for_error(response.error_code, f"delegation token of {created_for}")
        requester = created_for
        if hasattr(response, "token_requester_principal_name"):
            requester = f"{response.token_requester_principal_type}:{response.token_requester_principal_name}"
        return DelegationToken(
            response.token_id,
            created_for,
            requester,
            tuple(renewers),
            _milliseconds(response.issue_timestamp),
            _milliseconds(response.expiry_timestamp),
            _milliseconds(response.max_timestamp),
            base64.b64encode(response.hmac).decode(),
        )

    return cluster.call_controller(ask)


def list_tokens(cluster: Cluster, owners: Sequence[str] | None = None) -> list[DelegationToken]:
    """Return the tokens that this client may see: all, or those that one of `owners` owns or may renew.

    Raises Refused, Unavailable; ValueError for a principal that is not TYPE:NAME.
    """
    path = "describe_delegation_token.v3.request"
    owner_of = schema_class(f"{path}:DescribeDelegationTokenOwner")
    wanted = None
    if owners is not None:
        wanted = tuple(
            owner_of(principal_type=kind, principal_name=name) for kind, name in map(_principal, owners)
        )
    request = schema_class(f"{path}:DescribeDelegationTokenRequest")(owners=wanted)

    def ask(connection: Connection) -> list[DelegationToken]:
        response = connection.call(request)
        raise_for_error(response.error_code, "delegation tokens")
        return sorted(map(_described, response.tokens))

    return cluster.call_any(ask)


def renew_token(cluster: Cluster, hmac: str, period_ms: int = LONGEST) -> int:
    """Return when the token expires now. Raises Refused, Unavailable."""
    request = schema_class("renew_delegation_token.v2.request:RenewDelegationTokenRequest")(
        hmac=base64.b64decode(hmac), renew_period=period_ms * _MILLISECOND
    )
    return _change(cluster, request)


def expire_token(cluster: Cluster, hmac: str, period_ms: int = AT_ONCE) -> int:
    """Let the token expire after a period, or remove it at once; return when it expires. Raises Refused, Unavailable.

    Connections that were opened with the token stay until their session ends.
    """
    request = schema_class("expire_delegation_token.v2.request:ExpireDelegationTokenRequest")(
        hmac=base64.b64decode(hmac), expiry_time_period=period_ms * _MILLISECOND
    )
    return _change(cluster, request)


def _change(cluster: Cluster, request: Any) -> int:
    def ask(connection: Connection) -> int:
        response = connection.call(request)
        raise_for_error(response.error_code, "delegation token")
        return _milliseconds(response.expiry_timestamp)

    return cluster.call_controller(ask)


def _described(token: Any) -> DelegationToken:
    owner = f"{token.principal_type}:{token.principal_name}"
    requester = owner
    if hasattr(token, "token_requester_principal_name"):
        requester = f"{token.token_requester_principal_type}:{token.token_requester_principal_name}"
    return DelegationToken(
        token.token_id,
        owner,
        requester,
        tuple(f"{each.principal_type}:{each.principal_name}" for each in token.renewers),
        token.issue_timestamp,
        token.expiry_timestamp,
        token.max_timestamp,
        base64.b64encode(token.hmac).decode(),
    )


def _principal(text: str) -> tuple[str, str]:
    kind, colon, name = text.partition(":")
    if not colon or not kind or not name:
        raise ValueError(f"{text!r} is no principal such as User:alice")
    return kind, name


def _milliseconds(at: datetime) -> int:
    return round(at.timestamp() * 1000)
