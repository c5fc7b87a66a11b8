"""AddRaftVoter (key 80), v0-1. Makes a controller that has caught up a voter; the reply waits for the commit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.add_raft_voter.v1.response import AddRaftVoterResponse

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import Address, ReplicaKey, Voter


async def handle(ctx: RequestContext, request: Any) -> Any:
    """Raises NOT_CONTROLLER if another node is the leader."""
    try:
        check_cluster(ctx, request.cluster_id)
        voter = Voter(
            ReplicaKey(int(request.voter_id), request.voter_directory_id),
            tuple(Address(at.name, at.host, int(at.port)) for at in request.listeners),
        )
        _check(voter)
        await ctx.services.quorum.add_voter(voter)
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        return _response(error.code, error.message)
    return _response(ErrorCode.none, None)


def _check(voter: Voter) -> None:
    if voter.key.id < 0:
        raise ApiError(ErrorCode.invalid_request, f"no node has the id {voter.key.id}")
    if voter.key.directory is None:
        raise ApiError(ErrorCode.invalid_request, "a voter is known by its directory id too")
    if not voter.addresses:
        raise ApiError(ErrorCode.invalid_request, "a voter must be reached somewhere: no listener is named")


def _response(code: ErrorCode, message: str | None) -> Any:
    return AddRaftVoterResponse(throttle_time=timedelta(0), error_code=code, error_message=message)
