"""Observes a consumer group from outside: who may own which partition, and which offsets are committed.

The observer replays every record of the group's log when it is committed, in the order of the log, so it knows the
group's state before any member does. Members report what they take, let go of, commit and read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.classic.classic_group_data import ClassicGroupState
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.coordinator_records import OFFSET_KEY_TYPES, OffsetCommitRecord, decode_record
from penstock.groups.embedded_protocol import parse_assignment
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import MemberState
from penstock.protocol.record_batch import BatchHeader, Record
from penstock.protocol.stored_records import key_type
from simulation.checks.committed import CommittedLogs

#: The runtime takes a smaller difference between clocks for a delay, not for a step of the clock.
_CLOCK_STEP_S: Final = 1.2


class Member(Protocol):
    """What the observer knows of a member: its own view."""

    member_id: str
    instance_id: str | None
    #: The member epoch or generation.
    epoch: int
    owned: set[int]
    #: A request to join got no response. It may still arrive, and then tells the coordinator old news.
    has_lost_join: bool
    #: When it sent the last heartbeat that was answered without an error, in seconds of virtual time.
    heard_at: float | None


@dataclass(slots=True, kw_only=True)
class Commit:
    """One OffsetCommit for one partition. Its serial number is stored as the metadata of the offset."""

    serial: int
    member_id: str
    epoch: int
    partition: int
    offset: int
    #: None while the outcome is unknown.
    is_accepted: bool | None = None
    is_logged: bool = False


class Value(NamedTuple):
    """A committed offset, and the serial number of its commit."""

    offset: int = -1
    serial: int = 0


class Ownership:
    def __init__(self, committed: CommittedLogs, group_id: str, topic: str) -> None:
        self.committed = committed
        self.cluster = committed.cluster
        self.loop = committed.cluster.loop
        self.group_id = group_id
        self.topic = topic
        self.members: list[Member] = []
        self.commits: list[Commit] = []
        #: By partition: all offsets that were committed, in the order of the log.
        self._history: dict[int, list[Value]] = {}
        self._shard = GroupCoordinatorShard(GroupCoordinatorConfig())
        #: Since which epoch a member of a consumer group has had a partition without interruption.
        self._since: dict[tuple[str, int], int] = {}
        self._skews: dict[int, float] = {}
        self._has_small_clock_step = False
        committed.on_committed.append(self._take_in)

    @contextmanager
    def observing(self) -> Iterator[None]:
        loaded = GroupCoordinatorShard.loaded

        def loaded_observed(shard: GroupCoordinatorShard, now_ms: int) -> Any:
            work = loaded(shard, now_ms)
            for group in shard.groups.values():
                if (
                    isinstance(group, ClassicGroup)
                    and group.members
                    and group.state is ClassicGroupState.STABLE
                ):
                    self._check_converted(group)
            return work

        GroupCoordinatorShard.loaded = loaded_observed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            GroupCoordinatorShard.loaded = loaded  # type: ignore[method-assign]

    def _check_converted(self, group: ClassicGroup) -> None:
        """A group that was converted has no leader, and members that have left may hold partitions."""
        if group.stored is not None and group.stored.leader is None:
            raise self.loop.fail("a converted group is rebalanced", f"{group}: {group.stored}")

    # -- the group by its log --------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The committed state: a ConsumerGroup, a ClassicGroup or None."""
        return self._shard.groups.get(self.group_id)

    def member_ids(self) -> list[str]:
        group = self.group
        if isinstance(group, ConsumerGroup):
            return sorted(group.members)
        if isinstance(group, ClassicGroup) and group.stored is not None:
            return sorted(member.member_id for member in group.stored.members)
        return []

    def _owners(self) -> Iterator[tuple[int, str]]:
        """Every partition that a member may own by the committed state."""
        group = self.group
        if isinstance(group, ConsumerGroup):
            for member in group.members.values():
                for _, partition in member.current.owned():
                    yield partition, member.member_id
        elif isinstance(group, ClassicGroup) and group.stored is not None:
            for stored in group.stored.members:
                for _, partitions in parse_assignment(stored.assignment):
                    for partition in partitions:
                        yield partition, stored.member_id

    def _take_in(self, topic: str, index: int, header: BatchHeader, records: list[Record]) -> None:
        if topic != CONSUMER_OFFSETS or header.is_control:
            return
        known = self._revoking().keys()
        for record in records:
            if record.key is None:
                continue
            if key_type(record.key) in OFFSET_KEY_TYPES and record.value is not None:
                self._check_commit(decode_record(record.key, record.value))
            # Without members that have just been added, which may replace a static member: they have nothing yet.
            before = {name: state for name, state in self._revoking().items() if name in known}
            self._shard.replay(record.key, record.value)
            self._check_revocations(before)
        self._check_owners()
        self._note_since()

    def _revoking(self) -> dict[str, tuple[bool, int]]:
        """Whether each member has to revoke partitions, and its epoch."""
        group = self.group
        members = group.members.values() if isinstance(group, ConsumerGroup) else ()
        return {
            member.member_id: (member.current.phase is MemberState.UNREVOKED, member.current.epoch)
            for member in members
        }

    def _check_revocations(self, before: dict[str, tuple[bool, int]]) -> None:
        """A heartbeat that was sent before a member was told to revoke cannot confirm that it has revoked."""
        for member_id, (is_revoking, epoch) in self._revoking().items():
            if is_revoking and before.get(member_id) == (False, epoch):
                raise self.loop.fail(
                    "a revocation has an epoch of its own", f"{member_id} revokes in {epoch}: {self.group}"
                )

    def _check_owners(self) -> None:
        owners: dict[int, str] = {}
        group = self.group
        if isinstance(group, ConsumerGroup):
            names = [each.subscription.instance_id for each in group.members.values()]
            static = [name for name in names if name is not None]
            if len(set(static)) < len(static):
                raise self.loop.fail("a static member is in its group once", f"{group}")
        for partition, member_id in self._owners():
            if partition in owners:
                raise self.loop.fail(
                    "a partition has one owner",
                    f"{partition} is assigned to {owners[partition]} and {member_id}: {self.group}",
                )
            owners[partition] = member_id
            if isinstance(group, ConsumerGroup):
                self._check_let_go(partition, member_id)

    def _check_let_go(self, partition: int, member_id: str) -> None:
        """Check that every earlier owner of the partition has released it or is fenced."""
        for other in self.members:
            if (
                other.member_id != member_id
                and partition in other.owned
                and self._is_unfenced(other)
                and not other.has_lost_join
            ):
                raise self.loop.fail(
                    "a partition is assigned once it is free",
                    f"{partition} to {member_id}, {other} has it: {self.group}",
                )

    def _note_since(self) -> None:
        group = self.group
        members = group.members.values() if isinstance(group, ConsumerGroup) else ()
        self._since = {
            (member.member_id, partition): self._since.get(
                (member.member_id, partition), member.current.epoch
            )
            for member in members
            if member.current.epoch > 0
            for _, partition in member.current.owned()
        }

    # -- partitions ------------------------------------------------------------------------------------

    def takes(self, taker: Member, partition: int) -> None:
        """A member begins to work on a partition. Any other member that still does so has been fenced."""
        if not self._is_unfenced(taker):
            return  # it acts on an old response, and its commits are refused
        if (partition, taker.member_id) not in set(self._owners()) and not taker.has_lost_join:
            raise self.loop.fail(
                "members take what is assigned to them", f"{taker} takes {partition} of {self.group}"
            )
        for other in self.members:
            is_other = other is not taker and partition in other.owned
            if is_other and self._is_unfenced(other) and not other.has_lost_join:
                raise self.loop.fail(
                    "never two unfenced owners", f"{taker} takes {partition} beside {other}: {self.group}"
                )

    def _is_unfenced(self, member: Member) -> bool:
        group = self.group
        if isinstance(group, ConsumerGroup):
            return member.member_id in group.members
        if not isinstance(group, ClassicGroup) or group.stored is None:
            return False
        known = next((each for each in group.stored.members if each.member_id == member.member_id), None)
        if known is None:
            return False
        # A static member stays in the group although it did not join the latest generation.
        return member.epoch >= group.stored.generation or known.instance_id is None

    def confirmed(self, member: Member) -> None:
        """The coordinator has confirmed the member of a classic group in this generation."""
        group = self.group
        if not isinstance(group, ClassicGroup) or group.stored is None:
            return
        if group.stored.generation == member.epoch and member.member_id not in self.member_ids():
            raise self.loop.fail("confirmed members are stored", f"{member}: {group.stored}")

    def fenced(self, member: Member, session_s: float) -> None:
        """The coordinator does not know a member any more."""
        if member.heard_at is None or self._has_small_clock_step or member.has_lost_join:
            return
        silent_s = self.loop.now - member.heard_at
        if silent_s < session_s:
            raise self.loop.fail(
                "no member is removed while it sends heartbeats", f"{member} after {silent_s * 1000:.0f} ms"
            )

    def watch_clocks(self) -> None:
        for machine in self.cluster.machines.values():
            moved_s = machine.clock_skew_s - self._skews.get(machine.node_id, 0.0)
            self._skews[machine.node_id] = machine.clock_skew_s
            self._has_small_clock_step |= 0 < abs(moved_s) < _CLOCK_STEP_S

    # -- offsets ---------------------------------------------------------------------------------------

    def new_commit(self, member: Member, partition: int, offset: int) -> Commit:
        commit = Commit(
            serial=len(self.commits) + 1,
            member_id=member.member_id,
            epoch=member.epoch,
            partition=partition,
            offset=offset,
        )
        self.commits.append(commit)
        return commit

    def _values(self, partition: int) -> list[Value]:
        return self._history.setdefault(partition, [Value()])

    def _check_commit(self, record: Any) -> None:
        """A commit counts only if its member is not fenced and has owned the partition since that epoch."""
        assert isinstance(record, OffsetCommitRecord)
        assert record.value is not None
        if record.group != self.group_id:
            return
        commit = self.commits[int(record.value.metadata) - 1]
        if commit.is_logged:
            raise self.loop.fail("an offset is committed once", f"{commit}")
        if commit.is_accepted is False:
            raise self.loop.fail("a refused commit has no effect", f"{commit}")
        if not self._may_commit(commit):
            raise self.loop.fail("a fenced member's commit is refused", f"{commit}: {self.group}")
        commit.is_logged = True
        values = self._values(commit.partition)
        # A client that does not know the outcome reads the offset again; its request may still arrive after that.
        if commit.offset <= values[-1].offset and commit.is_accepted is not None:
            raise self.loop.fail("committed offsets never go back", f"{commit} after {values[-1]}")
        values.append(Value(commit.offset, commit.serial))

    def _may_commit(self, commit: Commit) -> bool:
        group = self.group
        if isinstance(group, ConsumerGroup):
            member = group.members.get(commit.member_id)
            if member is None:
                return False
            since = self._since.get((commit.member_id, commit.partition), commit.epoch + 1)
            return bool(member.current.epoch == commit.epoch or since <= commit.epoch)
        if not isinstance(group, ClassicGroup) or group.stored is None:
            return False
        # A generation whose assignment is not stored yet cannot commit.
        return commit.epoch == group.stored.generation and commit.member_id in self.member_ids()

    def accepted(self, commit: Commit) -> None:
        """The coordinator has confirmed a commit."""
        commit.is_accepted = True
        if not commit.is_logged:
            raise self.loop.fail("confirmed means committed", f"{commit}")

    def refused(self, commit: Commit) -> None:
        commit.is_accepted = False
        if commit.is_logged:
            raise self.loop.fail("a refused commit has no effect", f"{commit}")

    def mark(self) -> tuple[tuple[int, int], dict[int, int]]:
        """Call before an OffsetFetch."""
        newest = self.committed.newest_leader(CONSUMER_OFFSETS, 0)
        return newest, {partition: len(values) for partition, values in self._history.items()}

    def read(
        self, mark: tuple[tuple[int, int], dict[int, int]], node_id: int, partition: int, value: Value
    ) -> bool:
        """Check what OffsetFetch returned. Return False if an earlier coordinator may have answered."""
        newest, lengths = mark
        is_newest = newest == self.committed.newest_leader(CONSUMER_OFFSETS, 0) and newest[1] == node_id
        values = self._values(partition)
        possible = values[max(lengths.get(partition, 0) - 1, 0) :] if is_newest else values
        if value not in possible:
            raise self.loop.fail(
                "OffsetFetch returns what is committed",
                f"{value} of partition {partition} from node {node_id}, possible: {possible[-5:]}",
            )
        return is_newest

    def last(self, partition: int) -> Value:
        return self._values(partition)[-1]
