"""UpdateRaftVoter (key 82), v0. Changes a voter's endpoints; the reply waits until the change is committed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.update_raft_voter.v0.response import CurrentLeader, UpdateRaftVoterResponse

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import Address, ReplicaKey, Voter


async def handle(ctx: RequestContext, request: Any) -> Any:
    """Raises NOT_CONTROLLER if another node is the leader."""
    code = ErrorCode.none
    try:
        check_cluster(ctx, request.cluster_id)
        _check_epoch(ctx.services.quorum.epoch, request.current_leader_epoch)
        voter = Voter(
            ReplicaKey(int(request.voter_id), request.voter_directory_id),
            tuple(Address(at.name, at.host, int(at.port)) for at in request.listeners),
        )
        await ctx.services.quorum.update_voter(voter)
    except ApiError as error:
        if error.code is ErrorCode.not_controller:
            raise
        code = error.code
    return UpdateRaftVoterResponse(
        throttle_time=timedelta(0), error_code=code, current_leader=_current_leader(ctx)
    )


def _check_epoch(epoch: int, asked: int) -> None:
    if asked > epoch:
        raise ApiError(ErrorCode.unknown_leader_epoch)
    if 0 <= asked < epoch:
        raise ApiError(ErrorCode.fenced_leader_epoch)


def _current_leader(ctx: RequestContext) -> Any:
    quorum = ctx.services.quorum
    host, port = quorum.address_of(quorum.leader_id) or ("", -1)
    return CurrentLeader(leader_id=quorum.leader_id, leader_epoch=quorum.epoch, host=host, port=port)
