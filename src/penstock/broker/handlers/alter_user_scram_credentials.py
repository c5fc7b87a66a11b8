"""AlterUserScramCredentials (key 51), v0. Sets and removes SCRAM credentials in the metadata log.

The client salts the password, so that the password never leaves it. Without an authorizer, or with
allow.everyone.if.no.acl.found and no rule about the cluster, every client may send this request. Then only nodes and
super users may change the credentials of nodes, because a client that sets a node's password can log in as that node.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from kio.schema.alter_user_scram_credentials.v0.response import (
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)

from penstock.broker.config.access_settings import parse_principals
from penstock.broker.network.audit import audit_refusal
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.scram_credentials import (
    ScramDeletion,
    ScramResult,
    ScramUpsertion,
    alter_scram_credentials,
)
from penstock.cluster.scram_secret import SCRAM_SECRET_BYTES
from penstock.protocol.acls import CLUSTER_NAME, Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.security.principal import USER, Principal

_OF_A_NODE: Final = "Only nodes and super users may change the credentials of a node"


async def handle(ctx: RequestContext, request: Any) -> Any:
    refused: list[ScramResult] = []
    if not _may_change_nodes(ctx):
        request, refused = await _without_nodes(ctx, request)
    deletions = await ctx.mapped(_deletion, request.deletions)
    upsertions = await ctx.mapped(_upsertion, request.upsertions)
    results = await ctx.services.metadata.propose(
        lambda image: alter_scram_credentials(
            image, deletions, upsertions, new_secret=secrets.token_bytes(SCRAM_SECRET_BYTES)
        )
    )
    return AlterUserScramCredentialsResponse(
        throttle_time=timedelta(0),
        results=await ctx.mapped(_result, (*results, *refused)),
    )


def _may_change_nodes(ctx: RequestContext) -> bool:
    connection = ctx.connection
    if connection is None:
        return True
    if ctx.authorizer is not None and ctx.authorizer.has_rule_about(ResourceType.CLUSTER, CLUSTER_NAME):
        return True
    is_own_request = ctx.principal == connection.principal and connection.is_inter_broker
    return is_own_request or (
        not ctx.is_by_token
        and (
            connection.server.is_principal_of_node(ctx.principal)
            or ctx.principal in parse_principals(ctx.services.settings.string("super.users"))
        )
    )


async def _without_nodes(ctx: RequestContext, request: Any) -> tuple[Any, list[ScramResult]]:
    """Return the request without the users of nodes, and the results for these."""
    assert ctx.connection is not None
    server = ctx.connection.server
    asked = await ctx.mapped(lambda each: each.name, (*request.deletions, *request.upsertions))
    nodes = {name for name in set(asked) if server.is_principal_of_node(Principal(USER, name))}
    if not nodes:
        return request, []
    for name in nodes:
        audit_refusal(ctx, Operation.ALTER.name, ResourceType.USER.name, name)
    allowed = replace(
        request,
        deletions=tuple(each for each in request.deletions if each.name not in nodes),
        upsertions=tuple(each for each in request.upsertions if each.name not in nodes),
    )
    return allowed, [
        ScramResult(name, ErrorCode.cluster_authorization_failed, _OF_A_NODE) for name in sorted(nodes)
    ]


def _deletion(asked: Any) -> ScramDeletion:
    return ScramDeletion(asked.name, asked.mechanism)


def _upsertion(asked: Any) -> ScramUpsertion:
    return ScramUpsertion(asked.name, asked.mechanism, asked.iterations, asked.salt, asked.salted_password)


def _result(result: ScramResult) -> AlterUserScramCredentialsResult:
    return AlterUserScramCredentialsResult(
        user=result.user, error_code=result.error, error_message=result.message
    )
