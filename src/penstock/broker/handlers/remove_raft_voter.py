"""RemoveRaftVoter (key 81), v0. A voter is one no longer; answered once that is committed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.remove_raft_voter.v0.response import RemoveRaftVoterResponse

from penstock.broker.context import RequestContext
from penstock.broker.quorum.serving import check_cluster
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.values import ReplicaKey


async def handle(ctx: RequestContext, request: Any) -> Any:
    """Raises NOT_CONTROLLER where another node leads."""
    try:
        check_cluster(ctx, request.cluster_id)
        await ctx.node.quorum.remove_voter(ReplicaKey(int(request.voter_id), request.voter_directory_id))
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        return _response(error.code, error.message)
    return _response(ErrorCode.none, None)


def _response(code: ErrorCode, message: str | None) -> Any:
    return RemoveRaftVoterResponse(throttle_time=timedelta(0), error_code=code, error_message=message)
