"""AlterUserScramCredentials (key 51), v0. Sets and removes SCRAM credentials in the metadata log.

The client salts the password, so that the password never leaves it.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from kio.schema.alter_user_scram_credentials.v0.response import (
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
)

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.scram_credentials import (
    ScramDeletion,
    ScramResult,
    ScramUpsertion,
    alter_scram_credentials,
)
from penstock.cluster.scram_secret import SCRAM_SECRET_BYTES


async def handle(ctx: RequestContext, request: Any) -> Any:
    deletions = await ctx.mapped(_deletion, request.deletions)
    upsertions = await ctx.mapped(_upsertion, request.upsertions)
    results = await ctx.services.metadata.propose(
        lambda image: alter_scram_credentials(
            image, deletions, upsertions, new_secret=secrets.token_bytes(SCRAM_SECRET_BYTES)
        )
    )
    return AlterUserScramCredentialsResponse(
        throttle_time=timedelta(0),
        results=await ctx.mapped(_result, results),
    )


def _deletion(asked: Any) -> ScramDeletion:
    return ScramDeletion(asked.name, asked.mechanism)


def _upsertion(asked: Any) -> ScramUpsertion:
    return ScramUpsertion(asked.name, asked.mechanism, asked.iterations, asked.salt, asked.salted_password)


def _result(result: ScramResult) -> AlterUserScramCredentialsResult:
    return AlterUserScramCredentialsResult(
        user=result.user, error_code=result.error, error_message=result.message
    )
