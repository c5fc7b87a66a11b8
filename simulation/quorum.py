"""The shell around RaftNode: its log, its vote file, its messages. Durable before visible, one event at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.protocol.errors import ErrorCode
from penstock.raft import actions as act
from penstock.raft.node import RaftNode
from penstock.raft.types import (
    ElectionState,
    FetchReply,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    OffsetAndEpoch,
    ReplicaKey,
    Role,
    Voter,
    VoterHistory,
    Voters,
    VoterSet,
)
from simulation.disk import DiskFull
from simulation.simlog import Batch, SimLog
from simulation.snapshots import Snapshot

if TYPE_CHECKING:
    from simulation.node import Node

METADATA: Final = "metadata"
ELECTION_FILE: Final = "quorum-state"
SNAPSHOT_FILE: Final = "snapshot"
_SERVED_SNAPSHOT_ITEMS: Final = 8

Actions = list[act.Action]


class Quorum:
    """The quorum's member on one node."""

    def __init__(self, node: Node, *, is_controller: bool, bootstrap: tuple[int, ...]) -> None:
        self.node = node
        disk = node.machine.disk
        self.disk = disk
        self.log: SimLog = disk.logs[METADATA]
        self.snapshot: Snapshot | None = disk.files.get(SNAPSHOT_FILE)
        self.bootstrap = bootstrap
        self.is_controller = is_controller
        self.core = RaftNode(
            local=ReplicaKey(node.id, disk.directory),
            is_controller=is_controller,
            addresses=(),
            log=self.log,
            election=disk.files.get(ELECTION_FILE, ElectionState()),
            voters=self._voters_on_disk(),
            timings=node.timings.raft,
            draw=node.world.draw,
        )
        self._actions: deque[act.Action] = deque()
        self._next: deque[Callable[[], Actions]] = deque()
        self._inbox: deque[Callable[[], Actions]] = deque()
        self._is_busy = False
        self._timer_ms: int | None = None
        self._asked = 0
        self._download: list[Any] = []

    def start(self) -> None:
        self.event(lambda: self.core.start(self._now_ms()))
        self._sync()
        if self.is_controller:
            self._join_later()

    def _join_later(self) -> None:
        self.node.after(self.node.timings.session_ms // 2, self._join)

    def _join(self) -> None:
        """A controller whose disk was replaced takes the place of its former self among the voters."""
        self._join_later()
        known = self.core.voters.latest.get(self.node.id)
        key = self.core.local
        if known is None or known.key == key or self.high_watermark < 0:
            if known is None and self.high_watermark >= 0 and self.node.cluster.is_replaced(self.node.id):
                self.node.call_controller("add_voter", Voter(key), lambda _: None)
            return
        self.node.call_controller("remove_voter", known.key, lambda _: None)

    # --- what others need ---

    @property
    def is_leader(self) -> bool:
        return self.core.role is Role.LEADER

    @property
    def high_watermark(self) -> int:
        return -1 if self.core.high_watermark is None else self.core.high_watermark

    def append(self, payload: tuple[Any, ...]) -> int:
        """The leader's own records, as one batch, in its turn. The log's end afterwards."""
        self._append(payload, is_control=False)
        self._next.append(lambda: self.core.appended(self._now_ms()))
        return self.log.end_offset

    def in_turn(self, call: Callable[[], None]) -> None:
        """When everything that the rules have handed out is done: who leads is known then."""

        def event() -> Actions:
            call()
            return []

        self.event(event)

    def received(self, request: Any, respond: Callable[[Any], None]) -> None:
        self.event(lambda: self.core.received(request, respond, self._now_ms()))

    def add_voter(self, voter: Voter, respond: Callable[[Any], None]) -> None:
        self.event(lambda: self.core.add_voter(voter, respond, self._now_ms()))

    def remove_voter(self, key: ReplicaKey, respond: Callable[[Any], None]) -> None:
        self.event(lambda: self.core.remove_voter(key, respond, self._now_ms()))

    def resign(self) -> None:
        self.event(lambda: self.core.resign(self._now_ms()))

    def snapshot_at(self, applied: int, image: Any) -> None:
        """The image up to `applied`, which is committed, takes the place of the records before it."""
        epoch = self.log.epoch_at(applied - 1)
        before, self.snapshot = (
            self.snapshot,
            Snapshot.of(OffsetAndEpoch(applied, epoch), image, self.core.voters.as_of(applied)),
        )
        self._keep_snapshot()
        self.log.raise_start(before.id.offset if before is not None else 0)
        self.event(lambda: self.core.snapshot_taken(self._now_ms()))

    # --- events and actions ---

    def event(self, call: Callable[[], Actions]) -> None:
        self._inbox.append(call)
        if not self._is_busy:
            self._work()

    def _work(self) -> None:
        self._is_busy = True
        while not self.node.life.is_over:
            if self._actions:
                if not self._carry_out(self._actions.popleft()):
                    return  # it goes on when what must be durable is
            elif self._next:
                self._actions.extend(self._next.popleft()())
            elif self._inbox:
                role = self.core.role if hasattr(self.core, "role") else None
                self._actions.extend(self._inbox.popleft()())
                self._watch(role)
            else:
                break
        self._is_busy = False
        self._set_timer()

    def _resume(self) -> None:
        self._work()

    def _watch(self, before: Role | None) -> None:
        if self.core.role is not before:
            self.node.world.note("raft", self.node.id, self.core.role.value, "epoch", self.core.epoch)
            if self.core.role is Role.LEADER:
                self.node.invariants.raft_leader(self.node, self.core.epoch)

    def _carry_out(self, action: act.Action) -> bool:
        """False: it takes time, and nothing else leaves before."""
        match action:
            case act.SaveElection(election):
                return self.save_election(election)
            case act.SendRequest():
                self._send(action)
            case act.Truncate(offset):
                return self._truncate(offset)
            case act.AppendRecords(records):
                self._append_records(cast("tuple[Batch, ...]", records))
            case act.AppendControlRecords(records):
                self._append(tuple(records), is_control=True)
                self._next.append(lambda: self.core.appended(self._now_ms()))
            case act.SendReply(token, reply):
                cast("Callable[[Any], None]", token)(reply)
            case act.SendRecords(token, reply, offset):
                cast("Callable[[Any], None]", token)(self._served(reply, offset))
            case act.SendSnapshot(token, request, reply):
                cast("Callable[[Any], None]", token)(self._served_snapshot(request, reply))
            case act.WriteSnapshot(_, position, data):
                self._write_snapshot(position, cast("tuple[Any, ...]", data))
            case act.InstallSnapshot():
                return self._install_snapshot()
            case act.HighWatermarkAdvanced(offset):
                self.node.invariants.metadata_committed(self.node, self.log, offset)
                self.node.metadata.committed(offset)
            case act.LeaderChanged(leader_id, epoch):
                self.node.metadata.leader_changed(leader_id, epoch)
        return True

    def save_election(self, election: ElectionState) -> bool:
        self.disk.save(self.node.life, ELECTION_FILE, election, self._resume)
        return False

    def _send(self, action: act.SendRequest) -> None:
        target = action.to
        if target is None:
            others = [each for each in self.bootstrap if each != self.node.id]
            target = others[self._asked % len(others)] if others else self.node.id
            self._asked += 1

        def on_reply(reply: Any, refused: bool) -> None:
            self.event(lambda: self.core.answered(action, reply, self._now_ms(), refused=refused))

        self.node.call(target, "raft", action.request, on_reply)

    def _truncate(self, offset: int) -> bool:
        self.node.invariants.truncating(self.node, METADATA, self.log, offset)
        self.log.truncate(offset)
        self._next.append(lambda: self.core.appended(self._now_ms()))
        self._sync(self._resume)
        return False

    def _append_records(self, batches: tuple[Batch, ...]) -> None:
        for batch in batches:
            self._put(batch)
            for record in batch.payload if batch.is_control else ():
                if isinstance(record, Voters):
                    self.core.voters_appended(batch.base_offset, record.voters)
        self._next.append(lambda: self.core.appended(self._now_ms()))
        self._sync()

    def _append(self, payload: tuple[Any, ...], *, is_control: bool) -> None:
        log = self.log
        self._put(
            Batch(
                self.node.world.serial(),
                log.end_offset,
                log.end_offset + len(payload),
                self.core.epoch,
                payload,
                is_control=is_control,
            )
        )
        self._sync()

    def _put(self, batch: Batch) -> None:
        try:
            self.disk.require_room()
        except DiskFull:
            self.node.fail("no room for metadata")
            return
        self.log.append(batch)
        self.node.invariants.metadata_appended(self.node, self.log, batch)

    def _sync(self, then: Callable[[], None] | None = None) -> None:
        def synced() -> None:
            if then is not None:
                then()
            self.event(lambda: self.core.synced(self._now_ms()))

        self.node.sync(self.log, synced)

    def _served(self, reply: FetchReply, offset: int) -> FetchReply:
        batches = self.log.read(offset, self.log.end_offset, self.node.cluster.served_batches_max)
        return reply._replace(records=cast("bytes", tuple(batches)))

    # --- snapshots ---

    def _served_snapshot(
        self, request: FetchSnapshotRequest, reply: FetchSnapshotReply
    ) -> FetchSnapshotReply:
        if self.snapshot is None or self.snapshot.id != request.id:
            return reply._replace(error=ErrorCode.snapshot_not_found)
        items = self.snapshot.items
        part = items[request.position : request.position + _SERVED_SNAPSHOT_ITEMS]
        return reply._replace(size=len(items), position=request.position, data=cast("bytes", part))

    def _write_snapshot(self, position: int, data: tuple[Any, ...]) -> None:
        if position == 0:
            self._download = []
        assert len(self._download) == position, (len(self._download), position)
        self._download.extend(data)

    def _install_snapshot(self) -> bool:
        self.snapshot = Snapshot.from_items(tuple(self._download))
        self.log.restart(
            self.snapshot.id.offset, self.node.invariants.metadata_chain(self.snapshot.id.offset)
        )
        self._keep_snapshot()
        snapshot = self.snapshot

        def installed() -> Actions:
            self.core.voters_appended(snapshot.id.offset - 1, snapshot.voters)
            self.node.metadata.installed(snapshot)
            return self.core.snapshot_installed(self._now_ms())

        self._next.append(installed)
        self._sync(self._resume)
        return False

    def _keep_snapshot(self) -> None:
        assert self.snapshot is not None
        self.log.snapshot = self.snapshot.id
        self.disk.files[SNAPSHOT_FILE] = self.snapshot

    # --- time ---

    def _now_ms(self) -> int:
        return self.node.machine.clock.monotonic_ms()

    def _set_timer(self) -> None:
        deadline_ms = self.core.next_deadline_ms()
        if deadline_ms is not None and (self._timer_ms is None or deadline_ms < self._timer_ms):
            self._timer_ms = deadline_ms
            delay_ms = self.node.machine.clock.real_ms(max(0, deadline_ms - self._now_ms()))
            self.node.after(delay_ms, self._on_timer, deadline_ms)

    def _on_timer(self, set_for_ms: int) -> None:
        if self._timer_ms != set_for_ms:
            return
        self._timer_ms = None
        if self._is_busy:
            self.event(lambda: self.core.tick(self._now_ms()))
            return
        deadline_ms = self.core.next_deadline_ms()
        if deadline_ms is not None and deadline_ms <= self._now_ms():
            self.event(lambda: self.core.tick(self._now_ms()))
        else:
            self._set_timer()

    def _voters_on_disk(self) -> VoterHistory:
        history = VoterHistory()
        if self.snapshot is not None:
            history.add(self.snapshot.id.offset - 1, self.snapshot.voters)
        for batch in self.log.batches:
            for record in batch.payload if batch.is_control else ():
                if isinstance(record, Voters):
                    history.add(batch.base_offset, record.voters)
        return history


def founding_batch(voters: VoterSet) -> Batch:
    """What every founder's log begins with."""
    return Batch(0, 0, 1, 0, (Voters(voters=voters),), is_control=True)
