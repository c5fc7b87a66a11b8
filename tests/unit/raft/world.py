"""Members of a quorum, each with its disk, on a network that a test rules: one event at a time, no real time.

Every request is answered exactly once: by a reply, by nothing after a while, or by a refused connection when
the other side is down. Syncs take time; a crash loses what was not synced, and may fall between two actions.
"""

from __future__ import annotations

import heapq
import pickle
from collections import deque
from collections.abc import Callable
from random import Random
from uuid import UUID

from tests.unit.raft.memory_log import Entry, MemoryLog

from penstock.protocol.errors import ErrorCode
from penstock.raft import actions as act
from penstock.raft.node import RaftNode
from penstock.raft.types import (
    Address,
    ElectionState,
    OffsetAndEpoch,
    PeerReply,
    ReplicaKey,
    Reply,
    Request,
    Timings,
    Voter,
    VoterHistory,
    VoterSet,
)


def voter(key: ReplicaKey) -> Voter:
    return Voter(key, (Address("CONTROLLER", f"node{key.id}", 9093),))


class Crash(Exception):
    """Stops a member in the middle of its work."""


class Member:
    """A process and its disk."""

    def __init__(self, world: World, id: int, founders: VoterSet | None) -> None:
        self.world = world
        self.id = id
        self.founders = founders
        self.lives = 0
        self.disks = 0
        self.new_disk()

    def new_disk(self) -> None:
        self.disks += 1
        self.key = ReplicaKey(self.id, UUID(int=self.id * 16 + self.disks))
        self.log = MemoryLog()
        self.saved = ElectionState()
        self.node: RaftNode | None = None
        self.pieces = b""
        self.is_sync_held = False
        self._inbox: deque[Callable[[], list[act.Action]]] = deque()
        self._is_busy = False

    def start(self) -> None:
        assert self.node is None
        self.lives += 1
        self.log.sync(self.log.end_offset)
        history = VoterHistory(self.founders)
        for offset, voters in self.log.voter_sets():
            history.add(offset, voters)
        self.node = RaftNode(
            local=self.key,
            is_controller=True,
            addresses=voter(self.key).addresses,
            log=self.log,
            election=self.saved,
            voters=history,
            timings=self.world.timings,
            draw=lambda n: self.world.draw(self.id, n),
        )
        self.call(self.node.start)

    def stop(self, *, loses_unsynced: bool) -> None:
        self.node = None
        if loses_unsynced:
            self.log.lose_unsynced()
        self.world.connections_lost(self)

    # Driving the rules

    def call(self, method: Callable[..., list[act.Action]], *args: object, **named: object) -> None:
        """One event at a time: the next waits until all that came of this one is done."""
        self._inbox.append(lambda: method(*args, now_ms=self.world.now_ms, **named))
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self._work()
        except Crash:
            self.stop(loses_unsynced=True)
        finally:
            self._is_busy = False
            self._inbox.clear()

    def _work(self) -> None:
        while self._inbox:
            for action in self._inbox.popleft()():
                self.world.before(self, action)
                self._do(action)
        self._set_alarm()

    def _set_alarm(self) -> None:
        assert self.node
        deadline_ms = self.node.next_deadline_ms()
        if deadline_ms is not None:
            self.world.at(max(deadline_ms, self.world.now_ms), self._alarm, self.lives)

    def _alarm(self, life: int) -> None:
        if self.node and life == self.lives:
            deadline_ms = self.node.next_deadline_ms()
            if deadline_ms is not None and deadline_ms <= self.world.now_ms:
                self.call(self.node.tick)

    def _do(self, action: act.Action) -> None:
        node = self.node
        assert node
        match action:
            case act.SaveElection(election):
                self.saved = election
            case act.SendRequest():
                self.world.send(self, action)
            case act.SendReply(token, reply):
                self.world.reply(token, reply)
            case act.SendRecords(token, reply, offset):
                records = self.log.read(offset, self.world.entries_max())
                self.world.reply(token, reply._replace(records=records))
            case act.Truncate(offset):
                self.log.truncate(offset)
                self.call(node.appended)
            case act.AppendRecords(records):
                offset = self.log.append(pickle.loads(records))
                for at, voters in self.log.voter_sets(offset):
                    node.voters_appended(at, voters)
                self._appended()
            case act.AppendControlRecords(records, offset):
                assert offset == self.log.end_offset
                self.log.append([Entry(node.epoch, record) for record in records])
                self._appended()
            case _:
                self._do_snapshot(node, action)

    def _do_snapshot(self, node: RaftNode, action: act.Action) -> None:
        match action:
            case act.SendSnapshot(token, request, reply):
                data = self.log.read_snapshot(request.id)
                if data is None:
                    self.world.reply(token, reply._replace(error=ErrorCode.snapshot_not_found))
                else:
                    piece = data[request.position : request.position + 400]
                    self.world.reply(token, reply._replace(size=len(data), data=piece))
            case act.WriteSnapshot(_, position, data):
                self.pieces = self.pieces[:position] + data
            case act.InstallSnapshot(id):
                self._install(node, id)

    def _install(self, node: RaftNode, id: OffsetAndEpoch) -> None:
        self.log.install(id, self.pieces)
        self.pieces = b""
        offset_and_voters = [pair for pair in self.log.voter_sets() if pair[0] < id.offset]
        if offset_and_voters:
            node.voters_appended(id.offset - 1, offset_and_voters[-1][1])
        self.call(node.snapshot_installed)

    def write(self, value: str) -> int:
        assert self.node
        assert self.node.leader_id == self.id
        offset = self.log.append([Entry(self.node.epoch, value)])
        self._appended()
        return offset

    def _appended(self) -> None:
        assert self.node
        self.sync_later()
        self.call(self.node.appended)

    def sync_later(self) -> None:
        if not self.is_sync_held:
            self.world.after(
                self.world.sync_ms(), self._synced, self.lives, self.log.cuts, self.log.end_offset
            )

    def _synced(self, life: int, cuts: int, offset: int) -> None:
        if self.node and (life, cuts) == (self.lives, self.log.cuts):
            self.log.sync(offset)
            self.call(self.node.synced)


class Call:
    """A request that waits for its one answer."""

    def __init__(self, sender: Member, send: act.SendRequest, target: Member | None) -> None:
        self.sender = sender
        self.life = sender.lives
        self.send = send
        self.target = target
        self.is_open = True


class World:
    """The default network: one millisecond each way, nothing lost; `cuts` are pairs that cannot talk, by direction."""

    timings = Timings()

    def __init__(self) -> None:
        self.now_ms = 0
        self.members: dict[int, Member] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.refusals: set[tuple[int, int]] = set()
        self.calls: list[Call] = []
        self._events: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._turn = 0

    # What a test may rule

    def draw(self, id: int, n: int) -> int:
        return min(n - 1, (id - 1) * n // 5)

    def latency_ms(self) -> int:
        return 1

    def answer_ms_max(self) -> int:
        """How long an answer is waited for."""
        return self.timings.fetch_wait_ms + 300

    def sync_ms(self) -> int:
        return 1

    def entries_max(self) -> int:
        return 1000

    def is_dropped(self, sender: int, target: int) -> bool:
        return (sender, target) in self.cuts

    def copies(self) -> int:
        return 1

    def before(self, member: Member, action: act.Action) -> None:
        """Called before an action is carried out; may raise Crash."""

    def delivered(self, sender: int, target: int, message: Request | Reply) -> None:
        """Called when a message arrives."""

    def refused(self, sender: int, target: int) -> None:
        """Called when the sender learns that the target is down."""

    # Time

    def at(self, time_ms: int, function: Callable[..., None], *args: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_ms, self._count, function, args))

    def after(self, delay_ms: int, function: Callable[..., None], *args: object) -> None:
        self.at(self.now_ms + delay_ms, function, *args)

    def step(self, until_ms: int) -> bool:
        if not self._events or self._events[0][0] > until_ms:
            self.now_ms = max(self.now_ms, until_ms)
            return False
        time_ms, _, function, args = heapq.heappop(self._events)
        self.now_ms = max(self.now_ms, time_ms)
        function(*args)
        return True

    def run(self, until_ms: int) -> None:
        while self.step(until_ms):
            pass

    # The network

    def send(self, sender: Member, send: act.SendRequest) -> None:
        target = self.members.get(send.to) if send.to is not None else self._bootstrap(sender)
        call = Call(sender, send, target)
        self.calls.append(call)
        self.after(self.answer_ms_max(), self._answer, call, None, False)
        if target is None:
            self.after(self.latency_ms(), self._answer, call, None, False)
            return
        for _ in range(self.copies()):
            self.after(self.latency_ms(), self._deliver, call)

    def _bootstrap(self, sender: Member) -> Member | None:
        others = [member for member in self.members.values() if member is not sender]
        self._turn += 1
        return others[self._turn % len(others)] if others else None

    def _deliver(self, call: Call) -> None:
        target = call.target
        assert target
        if self.is_dropped(call.sender.id, target.id):
            return
        if target.node is None or (call.sender.id, target.id) in self.refusals:
            self.after(self.latency_ms(), self._answer, call, None, True)
            return
        self.delivered(call.sender.id, target.id, call.send.request)
        target.call(target.node.received, call.send.request, call)

    def reply(self, token: object, reply: Reply) -> None:
        if isinstance(token, Call):
            self.after(self.latency_ms(), self._carry_reply, token, reply)
        else:
            assert callable(token)
            token(reply)

    def _carry_reply(self, call: Call, reply: PeerReply) -> None:
        assert call.target
        if not self.is_dropped(call.target.id, call.sender.id):
            self._answer(call, reply, False)

    def _answer(self, call: Call, reply: PeerReply | None, refused: bool) -> None:
        if not call.is_open:
            return
        call.is_open = False
        self.calls.remove(call)
        sender = call.sender
        if sender.node and call.life == sender.lives:
            if reply is not None and call.target:
                self.delivered(call.target.id, sender.id, reply)
            elif refused and call.target:
                self.refused(sender.id, call.target.id)
            sender.call(sender.node.answered, call.send, reply, refused=refused)

    def connections_lost(self, member: Member) -> None:
        for call in list(self.calls):
            if call.target is member and not self.is_dropped(member.id, call.sender.id):
                self.after(self.latency_ms(), self._answer, call, None, True)


class RandomWorld(World):
    """Everything that may differ is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.drop_rate = 0.0
        self.duplicate_rate = 0.0
        self.crash_rate = 0.0
        self.delay_ms_max = 5

    def draw(self, id: int, n: int) -> int:
        return self.random.randrange(n)

    def latency_ms(self) -> int:
        slow = self.random.random() < 0.05
        return self.random.randint(1, self.delay_ms_max * (20 if slow else 1))

    def sync_ms(self) -> int:
        return self.random.choice((0, 1, 3, 10, 60, 150))

    def entries_max(self) -> int:
        return self.random.choice((1, 2, 1000))

    def is_dropped(self, sender: int, target: int) -> bool:
        return (sender, target) in self.cuts or self.random.random() < self.drop_rate

    def copies(self) -> int:
        return 2 if self.random.random() < self.duplicate_rate else 1

    def before(self, member: Member, action: act.Action) -> None:
        if self.random.random() < self.crash_rate:
            raise Crash
