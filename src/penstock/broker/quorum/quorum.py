"""This node's part in the metadata quorum: opens, starts and stops it, and answers the rest of the broker about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from penstock.broker.environment import end_process
from penstock.broker.quorum.driver import QuorumDriver
from penstock.broker.quorum.snapshots import DamagedSnapshot
from penstock.broker.quorum.storage import DamagedElection, QuorumStorage, open_storage, readable_voters
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.log.recovery import CorruptLog
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.actions import Action
from penstock.raft.types import (
    NO_LEADER,
    Address,
    OffsetAndEpoch,
    QuorumDescription,
    ReplicaKey,
    Request,
    Role,
    Voter,
    VoterChangeReply,
    VoterHistory,
    VoterSet,
)

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.node import Node
    from penstock.broker.quorum.snapshots import Snapshot
    from penstock.log.log_manager import LogManager

logger = logging.getLogger("penstock.quorum")


class Quorum:
    """`open`, then `start` once the listeners are bound; `leader_id` is -1 while nobody is known to lead."""

    def __init__(self, node: Node) -> None:
        self._node = node
        #: This node belongs to a cluster; before that it is still founding or looking for one.
        self.has_cluster = False
        self.leader_id = NO_LEADER
        self.epoch = 0
        #: Everything below this offset is committed; 0 while that is unknown.
        self.high_watermark = 0
        #: Whenever the leader, the voters or the high watermark may have changed.
        self.changed = asyncio.Event()
        self._state: QuorumStorage | None = None
        self._driver: QuorumDriver | None = None
        self._founded: asyncio.Future[None] | None = None
        self._logged_leader = (NO_LEADER, 0)

    def __repr__(self) -> str:
        return f"<Quorum {self._driver.core if self._driver else 'not started'}>"

    # -- life ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Blocking. Raises CorruptLog, DamagedSnapshot, DamagedElection, OSError."""
        store = self._node.store
        self._state = state = self._open_state()
        self.epoch = state.election.epoch if state.election else 0
        self.has_cluster = not state.is_empty or (not self.is_standalone and bool(store.cluster_id))

    def _open_state(self) -> QuorumStorage:
        """Where others vote, what is damaged here is set aside and fetched from them, as if the disk had been lost."""
        store, now_ms = self._node.store, self._node.now_ms()
        try:
            return open_storage(store, now_ms=now_ms)
        except (CorruptLog, DamagedSnapshot, DamagedElection) as error:
            if not self._has_other_voters():
                raise
            store.renew_voter_id()  # first, or a crash in between would leave a voter that has forgotten its vote
            folder = store.rename_to_stray(CLUSTER_METADATA, 0) if _is_stored(store) else None
            logger.critical(
                "the metadata log is damaged; it is fetched again from the other voters",
                extra={"reason": str(error), "kept_as": str(folder)},
            )
        return open_storage(store, now_ms=now_ms)

    def _has_other_voters(self) -> bool:
        """By what can still be read of the metadata, or else by the settings."""
        node = self._node
        known = set(readable_voters(node.store).ids) or set(node.settings.initial_voters)
        return not self.is_standalone and bool(known - {node.node_id})

    @property
    def state(self) -> QuorumStorage:
        assert self._state is not None, "the metadata log is not open yet"
        return self._state

    @property
    def is_standalone(self) -> bool:
        """The settings name no other node: there is nobody to ask."""
        settings = self._node.settings
        others = settings.initial_voters.keys() - {self._node.node_id}
        return not others and not settings.bootstrap_servers

    @property
    def local(self) -> ReplicaKey:
        return ReplicaKey(self._node.node_id, self._node.store.voter_id)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where other nodes reach this one; of a node without a listener for nodes, where clients do."""
        ports = {listener.name: listener.port for listener in self._node.listeners}
        settings = self._node.settings
        wanted = settings.inter_broker_listener
        return tuple(
            Address(at.name, at.host, at.port or ports[at.name])
            for at in settings.advertised
            if wanted is None or at.name == wanted
        )

    async def start(self) -> None:
        """Found, find or resume the cluster; returns once this node takes part in it. Raises WrongOwner."""
        is_founding = await self._founds_cluster()
        voters = self.state.voters
        if is_founding:
            voters = VoterHistory(VoterSet((Voter(self.local, self.addresses),)))
            self._founded = asyncio.get_running_loop().create_future()
        self._driver = QuorumDriver(
            self._node, self.state, voters=voters, addresses=self.addresses, listener=self
        )
        self._driver.start()
        if self._founded is not None:
            await self._founded
            await self._node.in_thread(self._node.store.join_cluster)
            logger.info("cluster founded", extra={"cluster": self._node.store.cluster_id})
        self.has_cluster = True
        if self._node.settings.is_controller and not self.is_only_voter:
            from penstock.broker.quorum.membership import maintain_membership

            self._node.spawn(maintain_membership(self._node))

    async def all_initial_voters_vote(self) -> None:
        """Before that, the death of a few founders could leave a quorum that the others cannot replace."""
        while not self._node.settings.initial_voters.keys() <= set(self.voters.ids):
            self.changed.clear()
            await self.changed.wait()

    async def _founds_cluster(self) -> bool:
        """Whether this node founds its cluster."""
        state, store = self.state, self._node.store
        if len(state.voters.latest):
            if not store.cluster_id:  # the end came between founding and naming the cluster
                await self._node.in_thread(store.join_cluster)
            return False
        if self.is_standalone or _predates_quorums(state, self.local):
            return True
        if store.cluster_id:
            return False
        from penstock.broker.quorum.membership import find_cluster

        cluster_id = await find_cluster(self._node)
        if cluster_id is not None:
            await self._node.in_thread(store.join_cluster, cluster_id)
        return cluster_id is None

    async def stop(self) -> None:
        """Hand over if leading, and take no more part. The log itself is closed with the store."""
        if self._driver is not None and not self._driver.is_stopped:
            await self._driver.finish()
            if self.leader_id == self._node.node_id:
                self.leader_changed(NO_LEADER, self.epoch)

    # -- what there is to know -------------------------------------------------------------------------

    @property
    def driver(self) -> QuorumDriver:
        """Raises NOT_CONTROLLER while there is none."""
        if self._driver is None:
            raise ApiError(ErrorCode.not_controller, "this node takes no part in a quorum yet")
        return self._driver

    @property
    def is_started(self) -> bool:
        return self._driver is not None

    @property
    def is_leader(self) -> bool:
        return self._driver is not None and self._driver.core.role is Role.LEADER

    @property
    def voters(self) -> VoterSet:
        return self._driver.core.voters.latest if self._driver else self.state.voters.latest

    @property
    def is_only_voter(self) -> bool:
        """This node is the only voter."""
        return self.voters.keys == (self.local,)

    @property
    def is_voter(self) -> bool:
        return self.voters.is_voter(self.local)

    @property
    def leader_high_watermark(self) -> int:
        """The leader's own, which a follower may still have to catch up with; -1 while unknown."""
        if self.is_leader or self._driver is None:
            return self.high_watermark or -1
        return self._driver.leader_high_watermark

    def address_of(self, node_id: int) -> tuple[str, int] | None:
        """Where the leader, a voter or a founder listens for other nodes."""
        addresses: tuple[Address, ...] = ()
        if self._driver is not None and node_id == self._driver.core.leader_id:
            addresses = self._driver.core.leader_addresses
        voter = self.voters.get(node_id)
        if not addresses and voter is not None:
            addresses = voter.addresses
        settings = self._node.settings
        for at in addresses:
            if at.name in ("", settings.inter_broker_listener):  # without a name: as a node told it
                return at.host, at.port
        # Known by another listener only: a voter of an earlier release, or a controller that names its own.
        if node_id in settings.initial_voters:
            return settings.initial_voters[node_id]
        return next(((at.host, at.port) for at in addresses), None)

    def addressed_replica(self, voter_id: int, directory: UUID | None) -> ReplicaKey:
        """The replica that a request is meant for; one that does not say means the node that reads it."""
        return ReplicaKey(self.local.id if voter_id < 0 else int(voter_id), directory)

    def describe(self) -> QuorumDescription:
        """Raises NOT_CONTROLLER where another node leads."""
        if not self.is_leader:
            raise ApiError(ErrorCode.not_controller)
        return self.driver.core.describe(self.driver.now_ms())

    def wall_clock_ms(self, quorum_ms: int) -> int:
        """A time that the core has noted; -1 stays unknown."""
        return -1 if quorum_ms < 0 else self._node.now_ms() - (self.driver.now_ms() - quorum_ms)

    # -- requests --------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Any:
        """A quorum request in the core's words, and the core's reply."""
        return await self.driver.received(request)

    def answer_fetch(
        self, ctx: RequestContext, frame: BytesLike, position: int, correlation_id: int
    ) -> Awaitable[bytes]:
        """Fetch of the metadata log: the body is at `position`. The whole encoded reply."""
        from penstock.broker.quorum.inbound_requests import answer_metadata_fetch

        return answer_metadata_fetch(ctx, frame, position, correlation_id)

    async def add_voter(self, voter: Voter) -> None:
        """Returns once committed. Raises ApiError."""
        own = self.voters.get(self.local.id)
        if self.is_leader and own is not None and own.addresses != self.addresses:
            # A node alone need not say where it listens; with another voter it must.
            await self.update_voter(Voter(self.local, self.addresses))
        await self._change_voters(self.driver.core.add_voter, voter)

    async def remove_voter(self, key: ReplicaKey) -> None:
        await self._change_voters(self.driver.core.remove_voter, key)

    async def update_voter(self, voter: Voter) -> None:
        await self._change_voters(self.driver.core.update_voter, voter)

    async def _change_voters(self, change: Callable[[Any, object, int], list[Action]], what: object) -> None:
        if not self.is_leader:
            raise ApiError(ErrorCode.not_controller)
        token: asyncio.Future[VoterChangeReply] = asyncio.get_running_loop().create_future()
        self.driver.post(lambda now_ms: change(what, token, now_ms))
        reply = await token
        self.changed.set()
        if reply.error is ErrorCode.not_leader_or_follower:
            raise ApiError(ErrorCode.not_controller, reply.message)
        if reply.error is not ErrorCode.none:
            raise ApiError(reply.error, reply.message)

    async def append(self, build: Callable[[], bytearray | None]) -> int | None:
        """`build` makes a batch for the end of the log, in the loop's own turn; None: there is none after all.

        Returns its last offset; it is not committed yet. Raises what `build` raises, and NOT_CONTROLLER.
        """
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        driver = self.driver

        def event(now_ms: int) -> list[Action]:
            try:
                if not self.is_leader:
                    raise ApiError(ErrorCode.not_controller)
                batch = build()
                _succeed(done, None if batch is None else driver.append(batch))
            except Exception as error:
                _fail(done, error)
            return []

        driver.post(event)
        return await done

    # -- what the loop tells ---------------------------------------------------------------------------

    def leader_changed(self, leader_id: int, epoch: int) -> None:
        self.leader_id, self.epoch = leader_id, epoch
        self._log_leader(leader_id, epoch)
        self._node.metadata.leader_changed(leader_id, epoch)
        self.changed.set()

    def _log_leader(self, leader_id: int, epoch: int) -> None:
        """Who looks for a leader may think of the last one again and again: only news is told."""
        if leader_id != NO_LEADER and (leader_id, epoch) != self._logged_leader:
            self._logged_leader = (leader_id, epoch)
            logger.info("quorum leader", extra={"leader": leader_id, "epoch": epoch})
        else:
            logger.debug("quorum leader", extra={"leader": leader_id, "epoch": epoch})

    def committed(self, offset: int) -> None:
        self.high_watermark = offset
        if self._founded is not None and not self._founded.done():
            self._founded.set_result(None)
        self._node.metadata.committed(offset)
        self.changed.set()

    def heard(self) -> None:
        self._node.metadata.heard()
        self.changed.set()

    def installed(self, snapshot: Snapshot, id: OffsetAndEpoch) -> None:
        logger.info("metadata snapshot installed", extra={"offset": id.offset, "epoch": id.epoch})
        self.high_watermark = max(self.high_watermark, id.offset)
        self._node.metadata.installed(snapshot.image, id)
        self.changed.set()

    def failed(self, error: Exception) -> None:
        """A start is broken off; a node that serves ends, for it must not decide or vote any more."""
        if self._node.state != "starting":
            end_process(error, "the quorum has failed")
        if self._founded is not None and not self._founded.done():
            self._founded.set_exception(error)
        self._node.metadata.failed(error)

    # -- snapshots -------------------------------------------------------------------------------------

    def snapshot_taken(self, id: OffsetAndEpoch) -> None:
        driver, newest = self.driver, self.driver.view.snapshot
        if newest is None or newest < id:  # else the leader's was installed while this one was written
            driver.view.snapshot = id
            driver.post(driver.core.snapshot_taken)


def _succeed(done: asyncio.Future[int | None], offset: int | None) -> None:
    """Whoever asked may have gone meanwhile."""
    if not done.done():
        done.set_result(offset)


def _fail(done: asyncio.Future[int | None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _is_stored(store: LogManager) -> bool:
    return (CLUSTER_METADATA, 0) in store.stored()


def _predates_quorums(state: QuorumStorage, local: ReplicaKey) -> bool:
    """Records, and nobody who votes: written by a release that knew one node only.

    A node that has just begun to copy a cluster's log has voted for nobody, but has heard of a leader.
    """
    if state.is_empty or len(state.voters.latest):
        return False
    election = state.election
    return election is None or election.voted == local
