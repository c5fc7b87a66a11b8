"""How a node becomes a member of the quorum: it finds or founds its cluster, and a controller then joins the voters.

A node without data joins a running cluster, or the initial voters found one together. An initial voter waits until all
others have said that they belong to no cluster. Then the one with the lowest id founds a quorum of one voter, and the
others join it. So an initial voter that has lost its disk finds the others' cluster and never founds a second one.

A controller joins the voters once it has caught up, and keeps its address in the voter set up to date.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.describe_quorum.v2.request import DescribeQuorumRequest, PartitionData, TopicData

from penstock.broker.network.peers import CONTROL, PeerUnreachable
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import NO_LEADER, ReplicaKey, Voter

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import PeerCalls
    from penstock.broker.quorum.quorum import Quorum


logger = logging.getLogger("penstock.quorum")

_DESCRIBE_QUORUM, _ADD, _REMOVE, _UPDATE = 55, 80, 81, 82
_DESCRIBE_CLUSTER: Final = 60
_ENDPOINT_TYPE_BROKERS: Final = 1
_PROBE_INTERVAL_S: Final = 0.1
_LOG_EVERY_ROUNDS: Final = 50
_TIMEOUT_S: Final = 10.0
#: The longest pause between two checks of this node's place in the voter set, and the pause after a refusal.
_CHECK_INTERVAL_S: Final = 1.0
_RETRY_S: Final = 0.3


class ProbeResult(Enum):
    NO_CLUSTER = "belongs to no cluster"
    NOT_KNOWN = "does not answer"


class QuorumMembership:
    def __init__(self, quorum: Quorum, settings: NodeSettings, peers: PeerCalls) -> None:
        self._quorum = quorum
        self._settings = settings
        self._peers = peers

    # -- finding or founding a cluster -----------------------------------------------------------------

    async def find_cluster(self) -> str | None:
        """Return the id of the cluster to join, or None if this node is to found one. Waits as long as it takes."""
        round_number = 0
        while True:
            addresses = self._settings.cluster_addresses
            answers = await asyncio.gather(*map(self._probe, addresses))
            for answer in answers:
                if isinstance(answer, str):
                    return answer
            if may_found(self._settings) and all(answer is ProbeResult.NO_CLUSTER for answer in answers):
                return None
            if round_number % _LOG_EVERY_ROUNDS == 0:
                summary = ", ".join(
                    f"{host}:{port} {answer.value if isinstance(answer, ProbeResult) else answer}"
                    for (host, port), answer in zip(addresses, answers, strict=True)
                )
                logger.info("looking for a cluster", extra={"servers": summary})
            round_number += 1
            await asyncio.sleep(_PROBE_INTERVAL_S * random.uniform(0.5, 1.5))

    async def _probe(self, where: tuple[str, int]) -> str | ProbeResult:
        timeout_s = self._settings.integer("controller.quorum.request.timeout.ms") / 1000
        cluster_request = DescribeClusterRequest(
            include_cluster_authorized_operations=False,
            endpoint_type=_ENDPOINT_TYPE_BROKERS,
            include_fenced_brokers=False,
        )
        try:
            cluster = await self._peers.call(
                where, _DESCRIBE_CLUSTER, cluster_request, timeout_s=timeout_s, purpose=CONTROL
            )
            if cluster.cluster_id:
                return str(cluster.cluster_id)
            quorum = await self._peers.call(
                where, _DESCRIBE_QUORUM, _DESCRIBE_METADATA, timeout_s=timeout_s, purpose=CONTROL
            )
        except (PeerUnreachable, TimeoutError):
            return ProbeResult.NOT_KNOWN
        has_none = quorum.error_code is ErrorCode.unknown_topic_or_partition
        return ProbeResult.NO_CLUSTER if has_none else ProbeResult.NOT_KNOWN

    # -- joining the voters ----------------------------------------------------------------------------

    async def maintain(self) -> None:
        quorum, reason = self._quorum, ""
        while True:
            quorum.changed.clear()
            try:
                await self._step()
            except (ApiError, PeerUnreachable, TimeoutError) as error:
                if str(error) != reason:
                    reason = str(error)
                    logger.info("not a voter yet", extra={"reason": reason})
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
                continue
            except Exception:
                logger.exception("cannot join the voters")
            try:
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await quorum.changed.wait()
            except TimeoutError:
                pass

    async def _step(self) -> None:
        """Make at most one change. Raises ApiError, PeerUnreachable, TimeoutError."""
        quorum = self._quorum
        has_caught_up = 0 <= quorum.leader_high_watermark <= quorum.state.log.synced.offset
        if quorum.leader_id == NO_LEADER or not has_caught_up:
            return
        known = quorum.voters.get(self._settings.node_id)
        if known is not None and known.key == quorum.local:
            if known.addresses != quorum.addresses:
                await self._update()
        elif self._settings.boolean("controller.quorum.auto.join.enable"):
            if known is not None:
                # This id with another disk, which is lost: it can never vote again, and an id may vote only once.
                await self._check_voter_is_gone(known.key)
                await self._remove(known.key)
            await self._add()

    async def _check_voter_is_gone(self, key: ReplicaKey) -> None:
        """Raises ApiError if another process votes under this id: it keeps its place.

        A live voter contacts the leader within the fetch timeout, so the leader is asked only after that.
        """
        epoch, timeout_ms = self._quorum.epoch, self._settings.integer("controller.quorum.fetch.timeout.ms")
        await asyncio.sleep(timeout_ms / 1000)
        silent_ms = await self._silent_ms(key)
        if self._quorum.epoch != epoch:
            raise ApiError(ErrorCode.not_leader_or_follower, "another leader was elected meanwhile")
        if silent_ms is not None and silent_ms < timeout_ms:
            raise ApiError(ErrorCode.duplicate_voter, f"another process votes as node {key.id}")

    async def _silent_ms(self, key: ReplicaKey) -> int | None:
        """Return how long a voter has not contacted the leader, by the leader's clock; None: never, or not a voter."""
        response = await self._peers.call(
            self._quorum.leader_id,
            _DESCRIBE_QUORUM,
            _DESCRIBE_METADATA,
            timeout_s=_TIMEOUT_S,
            purpose=CONTROL,
        )
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, response.error_message)
        (topic,) = response.topics
        (partition,) = topic.partitions
        fetched_ms = {
            (voter.replica_id, voter.replica_directory_id): voter.last_fetch_timestamp
            for voter in partition.current_voters
        }
        now_ms = max(fetched_ms.values(), default=-1)  # the leader reports the current time for itself
        found_ms = fetched_ms.get((key.id, key.directory), -1)
        return None if found_ms < 0 else now_ms - found_ms

    async def _add(self) -> None:
        from kio.schema.add_raft_voter.v1.request import AddRaftVoterRequest, Listener

        local = self._quorum.local
        request = AddRaftVoterRequest(
            cluster_id=self._quorum.cluster_id,
            timeout=timedelta(seconds=_TIMEOUT_S),
            voter_id=local.id,
            voter_directory_id=local.directory,
            listeners=tuple(
                Listener(name=at.name, host=at.host, port=at.port) for at in self._quorum.addresses
            ),
        )
        await self._request_leader(_ADD, request, accepted=(ErrorCode.duplicate_voter,))
        logger.info("joined the voters", extra={"node": local.id})

    async def _remove(self, key: ReplicaKey) -> None:
        from kio.schema.remove_raft_voter.v0.request import RemoveRaftVoterRequest

        request = RemoveRaftVoterRequest(
            cluster_id=self._quorum.cluster_id, voter_id=key.id, voter_directory_id=key.directory
        )
        await self._request_leader(_REMOVE, request, accepted=(ErrorCode.voter_not_found,))
        logger.warning(
            "a voter on a lost disk was removed", extra={"node": key.id, "disk": str(key.directory)}
        )

    async def _update(self) -> None:
        quorum = self._quorum
        if quorum.is_leader:
            await quorum.update_voter(Voter(quorum.local, quorum.addresses))
            return
        from kio.schema.update_raft_voter.v0.request import (
            KRaftVersionFeature,
            Listener,
            UpdateRaftVoterRequest,
        )

        request = UpdateRaftVoterRequest(
            cluster_id=quorum.cluster_id,
            current_leader_epoch=quorum.epoch,
            voter_id=quorum.local.id,
            voter_directory_id=quorum.local.directory,
            listeners=tuple(Listener(name=at.name, host=at.host, port=at.port) for at in quorum.addresses),
            k_raft_version_feature=KRaftVersionFeature(min_supported_version=0, max_supported_version=1),
        )
        await self._request_leader(_UPDATE, request)

    async def _request_leader(
        self, api_key: int, request: Any, *, accepted: tuple[ErrorCode, ...] = ()
    ) -> None:
        response = await self._peers.call(
            self._quorum.leader_id, api_key, request, timeout_s=_TIMEOUT_S, purpose=CONTROL
        )
        code: ErrorCode = response.error_code
        if code is not ErrorCode.none and code not in accepted:
            raise ApiError(code, getattr(response, "error_message", None))


def may_found(settings: NodeSettings) -> bool:
    """Whether this node may found a cluster: it has the lowest id of the initial voters, and no cluster is named."""
    return (
        settings.is_controller
        and not settings.bootstrap_servers
        and settings.node_id == min(settings.initial_voters, default=None)
    )


_DESCRIBE_METADATA: Final = DescribeQuorumRequest(
    topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(PartitionData(partition_index=0),)),)
)
