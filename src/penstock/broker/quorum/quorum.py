"""This node's part in the metadata quorum: opens, starts and stops it, and answers the rest of the broker about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from penstock.broker.environment import end_process
from penstock.broker.quorum import snapshots
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
    from penstock.broker.config.listeners import Listener
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, PeerCalls
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.quorum.membership import QuorumMembership
    from penstock.broker.quorum.snapshots import Snapshot
    from penstock.cluster.image import ClusterImage
    from penstock.log.log_manager import LogManager

logger = logging.getLogger("penstock.quorum")


class QuorumObserver(Protocol):
    """Receives the quorum's events, in order; `MetadataLog` is the observer."""

    def leader_changed(self, leader_id: int, epoch: int) -> None: ...

    def committed(self, offset: int) -> None: ...

    def heard(self) -> None: ...

    def installed(self, image: ClusterImage, id: OffsetAndEpoch) -> None: ...

    def failed(self, error: Exception) -> None: ...


class Quorum:
    """Call `open`, then `observe`, then `start` once the listeners are bound. `leader_id` is -1 without a leader."""

    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        *,
        peers: Callable[[], PeerCalls],
        listeners: Callable[[], tuple[Listener, ...]],
        is_starting: Callable[[], bool],
    ) -> None:
        """`listeners` returns them as bound. `peers` is called only if there are other nodes."""
        self._environment = environment
        self._settings = settings
        self._store = store
        self._peers = peers
        self._listeners = listeners
        self._is_starting = is_starting
        self._observer: QuorumObserver
        #: Whether this node belongs to a cluster; before that it is founding one or looking for one.
        self.has_cluster = False
        self.leader_id = NO_LEADER
        self.epoch = 0
        #: Everything below this offset is committed; 0 while that is unknown.
        self.high_watermark = 0
        #: Set whenever the leader, the voters or the high watermark may have changed.
        self.changed = asyncio.Event()
        self._state: QuorumStorage | None = None
        self._driver: QuorumDriver | None = None
        self._founded: asyncio.Future[None] | None = None
        self._logged_leader = (NO_LEADER, 0)

    def __repr__(self) -> str:
        return f"<Quorum {self._driver.core if self._driver else 'not started'}>"

    # -- life cycle ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the metadata log. Blocks. Raises CorruptLog, DamagedSnapshot, DamagedElection, OSError."""
        self._state = state = self._open_state()
        self.epoch = state.election.epoch if state.election else 0
        self.has_cluster = not state.is_empty or (
            not self._settings.is_standalone and bool(self._store.cluster_id)
        )

    def observe(self, observer: QuorumObserver) -> None:
        self._observer = observer

    def _open_state(self) -> QuorumStorage:
        """Open the state. If it is damaged and there are other voters, set it aside and fetch it from them."""
        store, now_ms = self._store, self._environment.now_ms()
        try:
            return open_storage(store, now_ms=now_ms)
        except (CorruptLog, DamagedSnapshot, DamagedElection) as error:
            if not self._has_other_voters():
                raise
            store.renew_voter_id()  # first, or a crash in between would leave a voter without its vote
            is_stored = (CLUSTER_METADATA, 0) in store.stored()
            folder = store.rename_to_stray(CLUSTER_METADATA, 0) if is_stored else None
            logger.critical(
                "the metadata log is damaged; it is fetched again from the other voters",
                extra={"reason": str(error), "kept_as": str(folder)},
            )
        return open_storage(store, now_ms=now_ms)

    def _has_other_voters(self) -> bool:
        """Read the voters from what is left of the metadata, or else from the settings."""
        known = set(readable_voters(self._store).ids) or set(self._settings.initial_voters)
        return not self._settings.is_standalone and bool(known - {self._settings.node_id})

    @property
    def state(self) -> QuorumStorage:
        assert self._state is not None, "the metadata log is not open yet"
        return self._state

    @property
    def cluster_id(self) -> str:
        """The id of this node's cluster; empty before it belongs to one."""
        return self._store.cluster_id

    @property
    def local(self) -> ReplicaKey:
        return ReplicaKey(self._settings.node_id, self._store.voter_id)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses for other nodes. A node without a listener for nodes has the addresses for clients here."""
        ports = {listener.name: listener.port for listener in self._listeners()}
        wanted = self._settings.node_listeners
        return tuple(
            Address(at.name, at.host, at.port or ports[at.name])
            for at in self._settings.advertised
            if not wanted or at.name in wanted
        )

    async def start(self) -> None:
        """Found, find or rejoin the cluster; return once this node takes part in it. Raises WrongOwner."""
        is_founding = await self._founds_cluster()
        voters = self.state.voters
        if is_founding:
            voters = VoterHistory(VoterSet((Voter(self.local, self.addresses),)))
            self._founded = asyncio.get_running_loop().create_future()
        self._driver = QuorumDriver(
            self._environment,
            self._settings,
            self._store,
            self.state,
            peers=self._peers,
            voters=voters,
            addresses=self.addresses,
            listener=self,
            is_starting=self._is_starting,
        )
        self._driver.start()
        if self._founded is not None:
            await self._founded
            await self._environment.in_thread(self._store.join_cluster)
            logger.info("cluster founded", extra={"cluster": self.cluster_id})
        self.has_cluster = True
        if self._settings.is_controller and not self.is_only_voter:
            self._environment.spawn(self._membership().maintain())

    async def all_initial_voters_vote(self) -> None:
        """Wait for all initial voters. Before that, the loss of a few could leave no quorum that can be repaired."""
        while not self._settings.initial_voters.keys() <= set(self.voters.ids):
            self.changed.clear()
            await self.changed.wait()

    async def _founds_cluster(self) -> bool:
        """Whether this node founds its cluster."""
        state, store = self.state, self._store
        if len(state.voters.latest):
            if not store.cluster_id:  # a crash came between founding and naming the cluster
                await self._environment.in_thread(store.join_cluster)
            return False
        if self._settings.is_standalone or _predates_quorums(state, self.local):
            return True
        if store.cluster_id:
            return False
        cluster_id = await self._membership().find_cluster()
        if cluster_id is not None:
            await self._environment.in_thread(store.join_cluster, cluster_id)
        return cluster_id is None

    def _membership(self) -> QuorumMembership:
        # Imported on first use: a standalone node does not need it.
        from penstock.broker.quorum.membership import QuorumMembership

        return QuorumMembership(self, self._settings, self._peers())

    async def stop(self) -> None:
        """Resign if leading, and take no more part. The log itself is closed with the store."""
        if self._driver is not None and not self._driver.is_stopped:
            await self._driver.finish()
            if self.leader_id == self._settings.node_id:
                self.leader_changed(NO_LEADER, self.epoch)

    # -- state -----------------------------------------------------------------------------------------

    @property
    def driver(self) -> QuorumDriver:
        """Raises NOT_CONTROLLER before the start."""
        if self._driver is None:
            raise ApiError(ErrorCode.not_controller, "this node is not part of a quorum yet")
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
        """Whether this node is the only voter."""
        return self.voters.keys == (self.local,)

    @property
    def is_voter(self) -> bool:
        return self.voters.is_voter(self.local)

    @property
    def leader_high_watermark(self) -> int:
        """The leader's high watermark, which may be ahead of this node's; -1 while unknown."""
        if self.is_leader or self._driver is None:
            return self.high_watermark or -1
        return self._driver.leader_high_watermark

    def address_of(self, node_id: int, listener: str | None = None) -> tuple[str, int] | None:
        """Return where the leader, a voter or an initial voter listens, by default for requests to controllers."""
        addresses: tuple[Address, ...] = ()
        if self._driver is not None and node_id == self._driver.core.leader_id:
            addresses = self._driver.core.leader_addresses
        voter = self.voters.get(node_id)
        if not addresses and voter is not None:
            addresses = voter.addresses
        settings = self._settings
        is_for_controllers = listener in (None, settings.controller_listener)
        listener = listener or settings.controller_listener
        for at in addresses:
            # A reply carries the address without a name: that of the controller listener.
            if at.name == listener or (at.name == "" and is_for_controllers):
                return at.host, at.port
        if not is_for_controllers:
            return None
        # Only another listener is known: of a voter with an earlier release, or with another listener name.
        if node_id in settings.initial_voters:
            return settings.initial_voters[node_id]
        return next(((at.host, at.port) for at in addresses), None)

    def addressed_replica(self, voter_id: int, directory: UUID | None) -> ReplicaKey:
        """Return the replica that a request is for; a request that names none is for this node."""
        return ReplicaKey(self.local.id if voter_id < 0 else int(voter_id), directory)

    def describe(self) -> QuorumDescription:
        """Raises NOT_CONTROLLER if this node does not lead."""
        if not self.is_leader:
            raise ApiError(ErrorCode.not_controller)
        return self.driver.core.describe(self.driver.now_ms())

    def wall_clock_ms(self, quorum_ms: int) -> int:
        """Convert a time of the core's clock; -1 stays unknown."""
        return -1 if quorum_ms < 0 else self._environment.now_ms() - (self.driver.now_ms() - quorum_ms)

    # -- requests --------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Any:
        """Pass a decoded quorum request to the core, and return its reply."""
        return await self.driver.received(request)

    def answer_fetch(
        self, ctx: RequestContext, frame: BytesLike, position: int, correlation_id: int
    ) -> Awaitable[bytes]:
        """Answer a Fetch of the metadata log, whose body is at `position`; return the whole encoded reply."""
        from penstock.broker.quorum.inbound_requests import answer_metadata_fetch

        return answer_metadata_fetch(ctx, frame, position, correlation_id)

    async def add_voter(self, voter: Voter) -> None:
        """Add a voter; return once that is committed. Raises ApiError."""
        own = self.voters.get(self.local.id)
        if self.is_leader and own is not None and own.addresses != self.addresses:
            # A sole voter has no addresses in the voter set; with a second voter it needs them.
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
        """Append the batch that `build` returns, within an event of the driver. `build` may return None for no batch.

        Returns the batch's last offset, which is not committed yet. Raises what `build` raises, and NOT_CONTROLLER.
        """
        done: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        driver = self.driver

        def event(now_ms: int) -> list[Action]:
            try:
                if not self.is_leader:
                    raise ApiError(ErrorCode.not_controller)
                batch = build()
                offset = None if batch is None else driver.append(batch)
                if not done.done():
                    done.set_result(offset)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            return []

        driver.post(event)
        return await done

    # -- events of the driver --------------------------------------------------------------------------

    def leader_changed(self, leader_id: int, epoch: int) -> None:
        self.leader_id, self.epoch = leader_id, epoch
        self._log_leader(leader_id, epoch)
        self._observer.leader_changed(leader_id, epoch)
        self.changed.set()

    def _log_leader(self, leader_id: int, epoch: int) -> None:
        """Log each leader once: a node that looks for a leader may report the last one repeatedly."""
        if leader_id != NO_LEADER and (leader_id, epoch) != self._logged_leader:
            self._logged_leader = (leader_id, epoch)
            logger.info("quorum leader", extra={"leader": leader_id, "epoch": epoch})
        else:
            logger.debug("quorum leader", extra={"leader": leader_id, "epoch": epoch})

    def committed(self, offset: int) -> None:
        self.high_watermark = offset
        if self._founded is not None and not self._founded.done():
            self._founded.set_result(None)
        self._observer.committed(offset)
        self.changed.set()

    def heard(self) -> None:
        self._observer.heard()
        self.changed.set()

    def installed(self, snapshot: Snapshot, id: OffsetAndEpoch) -> None:
        logger.info("metadata snapshot installed", extra={"offset": id.offset, "epoch": id.epoch})
        self.high_watermark = max(self.high_watermark, id.offset)
        self._observer.installed(snapshot.image, id)
        self.changed.set()

    def failed(self, error: Exception) -> None:
        """Fail the start, or end the process of a node that serves: it must not decide or vote any more."""
        if not self._is_starting():
            end_process(error, "the quorum has failed")
        if self._founded is not None and not self._founded.done():
            self._founded.set_exception(error)
        self._observer.failed(error)

    # -- snapshots -------------------------------------------------------------------------------------

    async def take_snapshot(self, image: ClusterImage, offset: int, *, last_timestamp_ms: int) -> None:
        """Write a snapshot of everything up to and including `offset`. Raises OSError."""
        driver = self.driver
        log, previous = driver.log, driver.view.snapshot
        id = OffsetAndEpoch(offset + 1, log.epochs.epoch_at(offset))
        if previous is not None and previous >= id:
            return
        await self._environment.in_thread(
            snapshots.write,
            log.directory,
            id,
            image,
            driver.core.voters.as_of(id.offset),
            last_timestamp_ms=last_timestamp_ms,
            now_ms=self._environment.now_ms(),
        )
        logger.info("metadata snapshot taken", extra={"offset": id.offset, "epoch": id.epoch})
        newest = driver.view.snapshot
        if (
            newest is None or newest < id
        ):  # else the leader's snapshot was installed while this one was written
            driver.view.snapshot = id
            driver.post(driver.core.snapshot_taken)
        if previous is not None:
            await self._delete_before(previous)

    async def _delete_before(self, kept: OffsetAndEpoch) -> None:
        """Delete what is older than the previous snapshot.

        That snapshot and the log since then stay, so that a replica slightly behind need not fetch a whole snapshot.
        """
        log, environment = self.driver.log, self._environment
        if kept.offset > log.end_offset:
            return  # another snapshot was installed meanwhile
        log.delete_records_before(kept.offset)
        expired = await environment.in_thread(log.expired_segments, environment.now_ms(), kept.offset)
        files = (
            log.remove_segments(expired, environment.now_ms(), end_offset=log.end_offset) if expired else []
        )
        await environment.in_thread(self._delete_files, log.directory, kept, files)

    def _delete_files(self, folder: Path, kept: OffsetAndEpoch, files: list[Path]) -> None:
        """Delete old snapshots and segment files, after the new log start is durable."""
        self._store.checkpoint()
        snapshots.remove(folder, (id for id in snapshots.stored(folder) if id < kept))
        for path in files:
            path.unlink(missing_ok=True)


def _predates_quorums(state: QuorumStorage, local: ReplicaKey) -> bool:
    """Whether an early release wrote the log, which knew only single nodes: it has records but no voters.

    A node that has just begun to copy a cluster's log has no voters either, but its election state names a leader.
    """
    if state.is_empty or len(state.voters.latest):
        return False
    election = state.election
    return election is None or election.voted == local
