"""The driver of raft: one task passes events to the raft core, one at a time, and carries out its actions in order.

Only one process may take part under a node id. A node that starts and hears again and again that its own id leads
the quorum fails its start. It waits before that, because a leader that has lost its disk and starts again also hears
its own id until the other voters have elected another leader.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from penstock.broker.quorum import snapshots, storage
from penstock.broker.quorum.control_records import encode_control_batch, voters_in
from penstock.broker.quorum.storage import MetadataLogView, QuorumStorage
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import iter_batches
from penstock.raft import actions as work
from penstock.raft.actions import Action, SendRequest
from penstock.raft.node import RaftNode
from penstock.raft.types import (
    Address,
    ElectionState,
    EndEpochRequest,
    FetchReply,
    OffsetAndEpoch,
    PeerReply,
    ReplicaKey,
    Request,
    Role,
    Timings,
    VoterHistory,
    VoterSet,
)

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, PeerCalls
    from penstock.broker.quorum.snapshots import Snapshot
    from penstock.log.log_manager import LogManager


class DuplicateNodeIdCheck:
    """Detects another process with this node's id that leads the quorum.

    A leader that has lost its disk and starts again also learns from its peers that it leads, until they elect another
    leader. So the check reports a duplicate only after a timeout.
    """

    def __init__(self, own_id: int, *, timeout_ms: int) -> None:
        self._own_id = own_id
        self._timeout_ms = timeout_ms
        self._since_ms: int | None = None

    def is_alive(self, leader_id: int, now_ms: int) -> bool:
        """Whether a duplicate leads. A peer has named `leader_id` as leader to this node, which does not lead."""
        if leader_id >= 0 and leader_id != self._own_id:
            self._since_ms = None
        elif leader_id == self._own_id and self._since_ms is None:
            self._since_ms = now_ms
        return self._since_ms is not None and now_ms - self._since_ms > self._timeout_ms


logger = logging.getLogger("penstock.quorum")

#: One event: called with the time, it returns the actions to carry out.
Event = Callable[[int], list[Action]]

#: Bytes of the log in one reply; a larger batch is sent whole.
SERVED_BYTES_MAX: Final = 4 << 20
SNAPSHOT_PIECE_BYTES_MAX: Final = 1 << 20
#: Pause after the disk has refused records of the leader.
_REFUSED_BACKOFF_S: Final = 0.2
#: How long a leader that stops waits until other voters have received its EndQuorumEpoch.
_RESIGN_WAIT_S: Final = 0.5
#: How long a leader holds a fetch that it has no records for.
_FETCH_WAIT_MS_MAX: Final = 500
#: A timer that fires this much too late: the process was suspended, or gets too little CPU time.
_LATE_S: Final = 0.1
#: How often the request timeout is doubled. A late reply is lost with its connection, so if every reply took longer
#: than the timeout, none would ever arrive.
_TIMEOUT_DOUBLINGS_MAX: Final = 2


class RaftListener(Protocol):
    """Receives the driver's events, in order."""

    def leader_changed(self, leader_id: int, epoch: int) -> None: ...

    def committed(self, offset: int) -> None: ...

    def heard(self) -> None: ...

    def installed(self, snapshot: Snapshot, id: OffsetAndEpoch) -> None: ...

    def failed(self, error: Exception) -> None: ...


class QuorumDriver:
    """One task handles the events that `post` receives, one after the other."""

    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        state: QuorumStorage,
        *,
        peers: Callable[[], PeerCalls],
        voters: VoterHistory,
        addresses: tuple[Address, ...],
        listener: RaftListener,
        is_starting: Callable[[], bool],
    ) -> None:
        self._environment = environment
        self._store = store
        self._peers = peers
        self._listener = listener
        self._is_starting = is_starting
        self._cluster_addresses = settings.cluster_addresses
        self._request_timeout_s = settings.integer("controller.quorum.request.timeout.ms") / 1000
        self._loop = asyncio.get_running_loop()
        self.log = state.log
        self.view = MetadataLogView(state.log, state.snapshot_id)
        self.core = RaftNode(
            local=ReplicaKey(settings.node_id, store.voter_id),
            is_controller=settings.is_controller,
            addresses=addresses,
            log=self.view,
            election=state.election or ElectionState(),
            voters=voters,
            timings=_timings(settings),
            draw=random.randrange,
        )
        #: The newest high watermark that a leader has sent, which may be ahead of this log.
        self.leader_high_watermark = -1
        self._inbox: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ms: int | None = None
        self._has_waited = False
        self._missed: dict[object, int] = {}  # by peer: requests in a row that timed out
        self._after: deque[Event] = (
            deque()
        )  # events that actions cause, handled once all actions are carried out
        self._grace_s = self.core.timings.fetch_timeout_ms / 1000
        self._is_syncing = self._wants_sync = False
        self._bootstrap = 0
        self._refusal: ErrorCode | None = None
        self._duplicate_node_id = DuplicateNodeIdCheck(
            settings.node_id, timeout_ms=settings.integer("initial.broker.registration.timeout.ms")
        )
        self.is_stopped = False
        self._task: asyncio.Task[None] | None = None
        self._sending: dict[asyncio.Task[None], SendRequest] = {}

    # -- the loop --------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def start(self) -> None:
        self.post(self.core.start)
        self._task = self._environment.spawn(self._run())

    def post(self, event: Event) -> None:
        self._inbox.append(event)
        self._wake.set()

    async def finish(self) -> None:
        """Resign if leading, and stop."""
        if self._task is None or self._task.done():
            return
        done: asyncio.Future[None] = self._loop.create_future()

        def end(now_ms: int) -> list[Action]:
            _complete(done, None)
            return []

        self.post(self.core.resign)
        self.post(end)
        await asyncio.wait((done, self._task), return_when=asyncio.FIRST_COMPLETED)
        self.is_stopped = True
        self._disarm()
        resignations = {
            task for task, send in self._sending.items() if isinstance(send.request, EndEpochRequest)
        }
        if resignations:
            await asyncio.wait(resignations, timeout=_RESIGN_WAIT_S)

    async def _run(self) -> None:
        try:
            while not self.is_stopped:
                while self._inbox:
                    await self._work(self._inbox.popleft())
                self._arm()
                self._wake.clear()
                if not self._inbox:
                    await self._wake.wait()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            unexpected = None if isinstance(error, QuorumFailed) else error
            logger.critical("the quorum driver has failed", exc_info=unexpected, extra={"reason": str(error)})
            self._listener.failed(error)

    async def _work(self, event: Event) -> None:
        self._after.append(event)
        while self._after:
            for action in self._after.popleft()(self.now_ms()):
                await self._carry_out(action)

    def _arm(self) -> None:
        deadline_ms = self.core.next_deadline_ms()
        if deadline_ms == self._armed_ms and self._timer is not None:
            return
        self._disarm()
        if deadline_ms is not None and not self.is_stopped:
            self._armed_ms, self._has_waited = deadline_ms, False
            # One millisecond late, because the core counts whole milliseconds and must see the deadline as passed.
            self._timer = self._loop.call_at((deadline_ms + 1) / 1000, self._tick, (deadline_ms + 1) / 1000)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._armed_ms = None

    def _tick(self, due: float) -> None:
        """Post a tick. If the process was suspended, handle the received requests first: peers are not silent then."""
        late_s = self._loop.time() - due
        if late_s > _LATE_S and not self._has_waited:
            self._has_waited = True
            self._timer = self._loop.call_later(min(late_s, self._grace_s), self._tick, due)
            return
        self._timer = self._armed_ms = None
        self.post(self.core.tick)

    # -- actions ---------------------------------------------------------------------------------------

    async def _carry_out(self, action: Action) -> None:
        match action:
            case work.SendRequest():
                self._begin_sending(action)
            case work.SendReply(token, reply):
                _complete(token, reply)
            case work.SendRecords(token, reply, offset):
                _complete(token, await self._with_records(reply, offset))
            case work.HighWatermarkAdvanced(offset):
                self._listener.committed(offset)
            case work.AppendRecords(records):
                await self._append_records(records)
            case work.AppendControlRecords():
                self._append_control(action)
            case work.SaveElection(election):
                await self._save(election)
            case work.LeaderChanged(leader_id, epoch):
                self._listener.leader_changed(leader_id, epoch)
            case work.Truncate(offset):
                await self._truncate(offset)
            case _:
                await self._carry_out_snapshot(action)

    async def _carry_out_snapshot(self, action: Action) -> None:
        folder = self.log.directory
        match action:
            case work.SendSnapshot():
                self._environment.spawn(self._serve_snapshot(action))
            case work.WriteSnapshot(id, position, data):
                await self._environment.in_thread(snapshots.receive, folder, id, position, data)
            case work.InstallSnapshot(id):
                await self._install(id)
            case _:
                raise AssertionError(f"unknown action: {action}")

    async def _save(self, election: ElectionState) -> None:
        try:
            save = partial(storage.save_election, self.log.directory, election)
            await self._environment.in_thread(self._store.space.with_reserve, save)
        except OSError as error:
            # The vote may or may not be on disk: this node can neither grant it nor vote for another candidate.
            raise QuorumFailed(f"the vote cannot be saved: {error}") from error

    async def _truncate(self, offset: int) -> None:
        logger.info("metadata log truncated", extra={"from_offset": self.log.end_offset, "to_offset": offset})
        now_ms = self._environment.now_ms()
        try:
            await self._environment.in_thread(
                self._store.truncate, CLUSTER_METADATA, 0, offset, now_ms=now_ms
            )
        except OSError as error:
            raise QuorumFailed(f"the metadata log cannot be truncated: {error}") from error
        self._after.append(self.core.appended)

    async def _append_records(self, records: bytes) -> None:
        """Append records of the leader as they are. Damaged records, or records with a gap, are fetched again."""
        now_ms = self._environment.now_ms()
        try:
            for _, batch in iter_batches(records):
                self.log.append_replicated(batch, now_ms=now_ms)
                for offset, voters in voters_in(batch):
                    self._after.append(partial(self._voters_appended, offset, voters))
        except ApiError as error:
            logger.error("metadata not appended", extra={"reason": str(error)})
            await asyncio.sleep(_REFUSED_BACKOFF_S)
        self._after.append(self.core.appended)
        self.want_sync()

    def _voters_appended(self, offset: int, voters: VoterSet, now_ms: int) -> list[Action]:
        self.core.voters_appended(offset, voters)
        return []

    def _append_control(self, action: work.AppendControlRecords) -> None:
        assert self.log.end_offset == action.offset, (self.log.end_offset, action.offset)
        now_ms = self._environment.now_ms()
        batch = encode_control_batch(action.records, epoch=self.core.epoch, now_ms=now_ms)
        try:
            self.append(batch)
        except ApiError as error:
            raise QuorumFailed(f"the metadata log cannot be written: {error}") from error

    def append(self, batch: bytearray) -> int:
        """Append a batch, within an event of the leader; return its last offset. Raises ApiError."""
        appended = self.log.append(
            memoryview(batch), leader_epoch=self.core.epoch, now_ms=self._environment.now_ms(), internal=True
        )
        self._after.append(self.core.appended)
        self.want_sync()
        return appended.last_offset

    # -- syncing ---------------------------------------------------------------------------------------

    def want_sync(self) -> None:
        self._wants_sync = True
        if not self._is_syncing:
            self._is_syncing = True
            self._environment.spawn(self._sync())

    async def _sync(self) -> None:
        """Sync the log, one sync at a time; everything appended meanwhile shares the next one."""
        try:
            while self._wants_sync:
                self._wants_sync = False
                await self._environment.sync(self.log)
                self.post(self.core.synced)
        finally:
            self._is_syncing = False

    # -- peers -----------------------------------------------------------------------------------------

    def _begin_sending(self, send: SendRequest) -> None:
        task = self._environment.spawn(self._send(send))
        self._sending[task] = send
        task.add_done_callback(self._sending.pop)

    async def _send(self, send: SendRequest) -> None:
        reply, refused = await self._ask(send)
        if reply is not None and self._is_starting():
            self.post(partial(self._check_duplicate_node_id, reply.leader_id))
        self.post(lambda now_ms: self.core.answered(send, reply, now_ms, refused=refused))
        if isinstance(reply, FetchReply) and reply.error is ErrorCode.none:
            self._note_high_watermark(reply.high_watermark)

    def _check_duplicate_node_id(self, leader_id: int, now_ms: int) -> list[Action]:
        if self.core.role is not Role.LEADER and self._duplicate_node_id.is_alive(leader_id, now_ms):
            raise QuorumFailed("another node with this id leads the quorum; each node needs an id of its own")
        return []

    def _note_high_watermark(self, high_watermark: int) -> None:
        if high_watermark > self.leader_high_watermark:
            self.leader_high_watermark = high_watermark
            self.post(self._notify_progress)

    def _notify_progress(self, now_ms: int) -> list[Action]:
        self._listener.heard()
        return []

    async def _ask(self, send: SendRequest) -> tuple[PeerReply | None, bool]:
        """Return the reply; or None, and whether the peer's host refused the connection."""
        from penstock.broker.network.peers import PeerUnreachable
        from penstock.broker.quorum.outbound_requests import send_request

        where = send.to if send.to is not None else self._next_bootstrap_server()
        if where is None:
            return None, False
        missed = self._missed.pop(where, 0)
        try:
            reply = await send_request(
                self._peers(),
                where,
                send.request,
                cluster_id=self._store.cluster_id or None,
                timeout_s=self._request_timeout_s * (1 << min(missed, _TIMEOUT_DOUBLINGS_MAX)),
            )
        except PeerUnreachable as error:
            return None, error.refused
        except TimeoutError:
            self._missed[where] = missed + 1
            return None, False
        except ApiError as error:
            self._report_refusal(where, error)
            return None, False
        except Exception:
            # The core waits for every reply, so a malformed one counts as no reply.
            logger.exception("malformed quorum reply", extra={"by": str(where)})
            return None, False
        self._refusal = None
        return reply, False

    def _report_refusal(self, where: object, error: ApiError) -> None:
        """Log a refusal once, not with every attempt."""
        if self._refusal is not error.code:
            self._refusal = error.code
            # A peer that is still joining its cluster is no reason for a warning.
            level = logging.INFO if error.code is ErrorCode.unknown_topic_or_partition else logging.WARNING
            logger.log(level, "quorum request refused", extra={"by": str(where), "reason": error.code.name})

    def _next_bootstrap_server(self) -> tuple[str, int] | None:
        servers = self._cluster_addresses
        self._bootstrap += 1
        return servers[self._bootstrap % len(servers)] if servers else None

    # -- serving ---------------------------------------------------------------------------------------

    def received(self, request: Request) -> asyncio.Future[PeerReply]:
        token: asyncio.Future[PeerReply] = self._loop.create_future()
        self.post(lambda now_ms: self.core.received(request, token, now_ms))
        return token

    async def _with_records(self, reply: FetchReply, offset: int) -> FetchReply:
        log = self.log
        try:
            try:
                piece = log.read(offset, SERVED_BYTES_MAX, log.end, nowait=True)
            except BlockingIOError:
                piece = await self._environment.in_thread(log.read, offset, SERVED_BYTES_MAX, log.end)
        except ApiError as error:
            logger.error("metadata cannot be read", extra={"offset": offset, "reason": str(error)})
            return reply._replace(error=error.code)
        return reply._replace(records=bytes(piece.data))

    async def _serve_snapshot(self, action: work.SendSnapshot) -> None:
        id, position = action.request.id, action.request.position
        try:
            size, data = await self._environment.in_thread(
                snapshots.read_piece, self.log.directory, id, position, SNAPSHOT_PIECE_BYTES_MAX
            )
            reply = action.reply._replace(size=size, position=position, data=data)
        except OSError:
            reply = action.reply._replace(error=ErrorCode.snapshot_not_found)
        _complete(action.token, reply)

    async def _install(self, id: OffsetAndEpoch) -> None:
        environment = self._environment
        snapshot = await environment.in_thread(snapshots.finish_receiving, self.log.directory, id)
        try:
            await environment.in_thread(
                self._store.truncate_fully_and_start_at,
                CLUSTER_METADATA,
                0,
                id.offset,
                now_ms=environment.now_ms(),
            )
        except OSError as error:
            raise QuorumFailed(f"the metadata log cannot be replaced with a snapshot: {error}") from error
        self.view.snapshot = id
        self._after.append(partial(self._voters_appended, id.offset - 1, snapshot.voters))
        self._after.append(self.core.snapshot_installed)
        self._listener.installed(snapshot, id)
        self.want_sync()  # the log now starts beyond its synced offset


class QuorumFailed(Exception):
    """This node cannot take part in the quorum any more, because its votes and appends may not survive a crash."""


def _complete(token: object, reply: object) -> None:
    assert isinstance(token, asyncio.Future)
    if not token.done():
        token.set_result(reply)


def _timings(settings: NodeSettings) -> Timings:
    fetch_timeout_ms = settings.integer("controller.quorum.fetch.timeout.ms")
    return Timings(
        election_timeout_ms=settings.integer("controller.quorum.election.timeout.ms"),
        fetch_timeout_ms=fetch_timeout_ms,
        # Shorter than the fetch timeout, or an idle leader would seem to be dead.
        fetch_wait_ms=min(_FETCH_WAIT_MS_MAX, fetch_timeout_ms // 3),
        backoff_max_ms=settings.integer("controller.quorum.election.backoff.max.ms"),
    )
