"""RemoveRaftVoter (key 81), v0. Removes a voter; the reply waits until the change is committed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.remove_raft_voter.v0.response import RemoveRaftVoterResponse

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import ReplicaKey


async def handle(ctx: RequestContext, request: Any) -> Any:
    """Raises NOT_CONTROLLER if another node is the leader."""
    try:
        check_cluster(ctx, request.cluster_id)
        await ctx.services.quorum.remove_voter(ReplicaKey(int(request.voter_id), request.voter_directory_id))
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        return _response(error.code, error.message)
    return _response(ErrorCode.none, None)


def _response(code: ErrorCode, message: str | None) -> Any:
    return RemoveRaftVoterResponse(throttle_time=timedelta(0), error_code=code, error_message=message)
