"""Runs a script of what happens to a quorum and writes down what its members do.

A line that starts with `>` is a command; the lines below it are what came of it, each with its time. Fetches that
find nothing special are not shown, nor are syncs: appends, high watermarks, partings and roles are.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.raft.world import Member, World, voter

from penstock.protocol.errors import ErrorCode
from penstock.raft import actions as act
from penstock.raft.types import (
    BeginEpochReply,
    BeginEpochRequest,
    ElectionState,
    EndEpochReply,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    Reply,
    Request,
    Role,
    VoterChangeReply,
    VoteReply,
    VoteRequest,
    VoterSet,
)


class Script(World):
    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._roles: dict[int, str] = {}
        self._shown_ms = -1
        self._verbs: dict[str, Callable[..., None]] = {
            "cluster": self._cluster,
            "settled": self._settled,
            "node": self._new_node,
            "until": lambda time_ms: self.run(int(time_ms)),
            "write": self._write,
            "cut": self._cut,
            "heal": self.cuts.clear,
            "refuse": lambda target, sender: self._refuse(int(target), int(sender)),
            "accept": lambda target, sender: self.refusals.discard((int(sender), int(target))),
            "kill": lambda id: self._member(id).stop(loses_unsynced=False),
            "power-loss": lambda id: self._member(id).stop(loses_unsynced=True),
            "restart": lambda id: self._member(id).start(),
            "new-disk": self._new_disk,
            "disk-epoch": lambda id, epoch: setattr(self._member(id), "saved", ElectionState(int(epoch))),
            "hold-sync": self._hold_sync,
            "sync": self._sync,
            "resign": self._resign,
            "add": self._add,
            "remove": self._remove,
            "readdress": self._readdress,
            "snapshot": self._snapshot,
            "show": self._show,
            "describe": self._describe,
        }

    def run_line(self, line: str) -> list[str]:
        verb, *words = line.split()
        self._verbs[verb](*words)
        self._watch_roles()
        lines, self._lines, self._shown_ms = self._lines, [], -1
        return lines

    # Commands

    def _cluster(self, *ids: str) -> None:
        for id in ids:
            self.members[int(id)] = Member(self, int(id), None)
        founders = VoterSet(tuple(voter(member.key) for member in self.members.values()))
        for member in self.members.values():
            member.founders = founders
            member.start()

    def _settled(self, *ids: str) -> None:
        """A cluster after its first election, of which election_of_three.txt has the details."""
        self._cluster(*ids)
        self.run(300)
        self._lines = []
        self._show()

    def _new_node(self, id: str) -> None:
        self.members[int(id)] = Member(self, int(id), None)
        self._member(id).start()

    def _member(self, id: str) -> Member:
        return self.members[int(id)]

    def _write(self, id: str, *values: str) -> None:
        for value in values:
            self._member(id).write(value)

    def _cut(self, *links: str) -> None:
        """`1` from everyone, `1-2` both ways, `1>2` one way."""
        for link in links:
            if ">" in link:
                sender, target = link.split(">")
                self.cuts.add((int(sender), int(target)))
            else:
                one, _, other = link.partition("-")
                for id in [int(other)] if other else self.members.keys() - {int(one)}:
                    self.cuts |= {(int(one), id), (id, int(one))}

    def _refuse(self, target: int, sender: int) -> None:
        """The target's host closes what the sender has open, and takes no more from it."""
        self.refusals.add((sender, target))
        for call in list(self.calls):
            if call.target is self.members[target] and call.sender.id == sender:
                self._answer(call, None, True)

    def _new_disk(self, id: str) -> None:
        member = self._member(id)
        member.founders = None
        member.new_disk()
        member.start()

    def _hold_sync(self, id: str) -> None:
        self._member(id).is_sync_held = True

    def _sync(self, id: str) -> None:
        member = self._member(id)
        member.is_sync_held = False
        member.sync_later()

    def _resign(self, id: str) -> None:
        member = self._member(id)
        assert member.node
        member.call(member.node.resign)

    def _add(self, leader: str, id: str) -> None:
        node = self._member(leader).node
        assert node
        self._change(leader, f"add {id}", node.add_voter, voter(self._member(id).key))

    def _remove(self, leader: str, id: str) -> None:
        node = self._member(leader).node
        assert node
        known = node.voters.latest.get(int(id))
        self._change(leader, f"remove {id}", node.remove_voter, known.key if known else self._member(id).key)

    def _readdress(self, leader: str, id: str) -> None:
        node = self._member(leader).node
        assert node
        self._change(
            leader, f"readdress {id}", node.update_voter, voter(self._member(id).key)._replace(addresses=())
        )

    def _change(self, leader: str, name: str, method: Callable[..., list[act.Action]], what: object) -> None:
        def answer(reply: Reply) -> None:
            assert isinstance(reply, VoterChangeReply)
            outcome = "done" if reply.error is ErrorCode.none else f"{reply.error.name} ({reply.message})"
            self._say(f"{leader} {name}: {outcome}")

        self._member(leader).call(method, what, answer)

    def _snapshot(self, id: str, start: str | None = None) -> None:
        """Of everything committed; the log then starts at `start`, or at the snapshot's end."""
        member = self._member(id)
        assert member.node
        offset = member.node.high_watermark
        assert offset is not None
        member.log.take_snapshot(offset, offset if start is None else int(start))
        member.call(member.node.snapshot_taken)

    def _show(self, *ids: str) -> None:
        for member in self.members.values():
            if not ids or str(member.id) in ids:
                self._lines.append(f"{member.id} {self._state_of(member)}: {member.log}")

    def _state_of(self, member: Member) -> str:
        node = member.node
        if node is None:
            return "down"
        leads = f" of {node.leader_id}" if node.role is Role.FOLLOWER else ""
        mark = f"high watermark {node.high_watermark}"
        voters = ",".join(str(id) for id in node.voters.latest.ids)
        return f"{node.role.value}{leads} in epoch {node.epoch}, {mark}, voters {voters or 'unknown'}"

    def _describe(self, id: str) -> None:
        node = self._member(id).node
        assert node
        view = node.describe(self.now_ms)
        self._lines.append(f"leader {view.leader_id} epoch {view.epoch} high watermark {view.high_watermark}")
        for kind, replicas in (("voter", view.voters), ("observer", view.observers)):
            for one in replicas:
                times = f"fetched at {one.last_fetch_ms}, caught up at {one.last_caught_up_ms}"
                self._lines.append(f"{kind} {one.key.id}: offset {one.offset}, {times}")

    # What is written down

    def _say(self, line: str) -> None:
        if self.now_ms != self._shown_ms:
            self._shown_ms = self.now_ms
            self._lines.append(f"at {self.now_ms}")
        self._lines.append(f"  {line}")

    def step(self, until_ms: int) -> bool:
        more = super().step(until_ms)
        self._watch_roles()
        return more

    def _watch_roles(self) -> None:
        for member in self.members.values():
            self._watch_role(member)

    def _watch_role(self, member: Member) -> None:
        role = "down"
        if member.node:
            node = member.node
            role = f"{node.role.value} in epoch {node.epoch}"
            if node.role is Role.FOLLOWER:
                role = f"follower of {node.leader_id} in epoch {node.epoch}"
        if self._roles.get(member.id) != role:
            self._roles[member.id] = role
            self._say(f"{member.id} {role}")

    def before(self, member: Member, action: act.Action) -> None:
        self._watch_role(member)
        match action:
            case act.SaveElection(election):
                voted = f", voted for {election.voted.id}" if election.voted else ""
                self._say(f"{member.id} saves epoch {election.epoch}{voted}")
            case act.AppendControlRecords(records, offset):
                self._say(
                    f"{member.id} appends {', '.join(type(one).__name__ for one in records)} at {offset}"
                )
            case act.AppendRecords():
                self._say(f"{member.id} appends records at {member.log.end_offset}")
            case act.Truncate(offset):
                self._say(f"{member.id} truncates to {offset}")
            case act.InstallSnapshot(id):
                self._say(f"{member.id} installs snapshot {id.offset}/{id.epoch}")
            case act.HighWatermarkAdvanced(offset):
                self._say(f"{member.id} high watermark {offset}")

    def refused(self, sender: int, target: int) -> None:
        self._say(f"{sender} is refused by the host of {target}")

    def delivered(self, sender: int, target: int, message: Request | Reply) -> None:
        text = _message_text(message)
        if isinstance(message, FetchReply) and message.error is ErrorCode.not_leader_or_follower:
            node = self.members[target].node
            # A node without a leader asks all others; only a leader's own refusal is worth a line.
            text = text if node and node.leader_id == sender else None
        if text:
            self._say(f"{sender} -> {target}: {text}")


def _message_text(message: Request | Reply) -> str | None:
    match message:
        case VoteRequest():
            kind = "pre-vote" if message.pre_vote else "vote"
            return f"{kind} in epoch {message.epoch}? log {message.last.offset}/{message.last.epoch}"
        case VoteReply():
            return _error(message) or ("granted" if message.granted else "refused")
        case BeginEpochRequest():
            return f"epoch {message.epoch} begins"
        case EndEpochRequest():
            successors = ",".join(str(key.id) for key in message.successors)
            return f"epoch {message.epoch} ends, successors {successors}"
        case BeginEpochReply() | EndEpochReply():
            return _error(message)
        case FetchReply():
            return _error(message) or _parting(message)
        case FetchSnapshotRequest():
            return f"snapshot {message.id.offset}/{message.id.epoch}?" if message.position == 0 else None
        case FetchSnapshotReply():
            return _error(message)
        case FetchRequest() | VoterChangeReply():
            return None


def _error(
    reply: VoteReply | BeginEpochReply | EndEpochReply | FetchReply | FetchSnapshotReply,
) -> str | None:
    if reply.error is ErrorCode.none:
        return None
    return f"{reply.error.name.upper()}, epoch {reply.epoch} leader {reply.leader_id}"


def _parting(reply: FetchReply) -> str | None:
    if reply.diverging:
        return f"histories part at {reply.diverging.offset}/{reply.diverging.epoch}"
    return f"needs snapshot {reply.snapshot.offset}/{reply.snapshot.epoch}" if reply.snapshot else None
