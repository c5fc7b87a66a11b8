"""A consumer group whose members join, leave, crash, are suspended and return, by one protocol or by both.

`ConsumerMember` uses the consumer protocol (KIP-848), `ClassicMember` the classic one. In a mixed group, members of
both kinds share the partitions, and the group is converted whenever the first or last member of one kind comes or goes.
"""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final

from penstock.groups.embedded_protocol import encode_assignment, parse_assignment, parse_subscription
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
)
from penstock.protocol.errors import ErrorCode
from simulation.checks.committed import CommittedLogs
from simulation.checks.ownership import Commit, Ownership, Value
from simulation.client import FIND_COORDINATOR, Client, message
from simulation.cluster import Cluster, TopicShape
from simulation.worlds.base import World

OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
CONSUMER_GROUP_HEARTBEAT: Final = 68

GROUP: Final = "group"
TOPIC: Final = "orders"
SESSION_S: Final = 0.4
_BEAT_S: Final = (0.04, 0.1)
#: Longer than a session, so that no member is removed for being slow while it sends heartbeats.
_REBALANCE_S: Final = 3.0
_JOIN_S: Final = 1.2
_LEAVE_ATTEMPTS: Final = 3
_MEMBERS_MAX: Final = 4
_INSTANCES: Final = ("i0", "i1")

#: The coordinator has decided: the request had no effect, and never will.
_REFUSED: Final = frozenset(
    {
        ErrorCode.unknown_member_id,
        ErrorCode.illegal_generation,
        ErrorCode.stale_member_epoch,
        ErrorCode.fenced_instance_id,
        ErrorCode.fenced_member_epoch,
        ErrorCode.rebalance_in_progress,
        ErrorCode.unsupported_version,
        ErrorCode.group_id_not_found,
    }
)
_MOVED: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)


class GroupClient(Client):
    """Knows the group's coordinator, and reads the group's offsets."""

    def __init__(self, world: ConsumerWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.ownership = world.ownership
        self._coordinator = -1

    async def ask(self, api_key: int, version: int, request: Any, *, timeout_s: float = SESSION_S) -> Any:
        """Send a request to the coordinator; None if there was no response, or none from a coordinator."""
        if self._coordinator < 0:
            await self._find_coordinator()
        reply = await self.call(self._coordinator, api_key, version, request, timeout_s=timeout_s)
        if reply is None or getattr(reply, "error_code", None) in _MOVED:
            self._coordinator = -1
            await self.back_off()
            return None
        return reply

    async def _find_coordinator(self) -> None:
        request = message(FIND_COORDINATOR, 4)(
            "FindCoordinatorRequest", key_type=0, coordinator_keys=(GROUP,)
        )
        while self._coordinator < 0:
            reply = await self.call(self.any_node(), FIND_COORDINATOR, 4, request)
            if reply is not None and reply.coordinators[0].error_code == ErrorCode.none:
                self._coordinator = int(reply.coordinators[0].node_id)
            else:
                await self.back_off()

    async def read_offset(self, partition: int, member_id: str | None = None, epoch: int = -1) -> int | None:
        """Return the committed offset, -1 if there is none; None if the newest coordinator did not say."""
        new = message(OFFSET_FETCH, 9)
        topics = (new("OffsetFetchRequestTopics", name=TOPIC, partition_indexes=(partition,)),)
        group = new(
            "OffsetFetchRequestGroup", group_id=GROUP, member_id=member_id, member_epoch=epoch, topics=topics
        )
        request = new("OffsetFetchRequest", groups=(group,), require_stable=True)
        mark = self.ownership.mark()
        reply = await self.ask(OFFSET_FETCH, 9, request)
        if reply is None:
            return None
        (found,) = reply.groups
        if found.error_code != ErrorCode.none:
            if found.error_code in _MOVED:
                self._coordinator = -1
            return None
        (part,) = found.topics[0].partitions
        if part.error_code != ErrorCode.none:
            return None
        value = Value(int(part.committed_offset), int(part.metadata or 0))
        if not self.ownership.read(mark, self._coordinator, partition, value):
            return None
        self.counts["offsets read"] += 1
        return value.offset


class Reader(GroupClient):
    """Reads the committed offsets without being a member."""

    is_done = False

    async def run(self) -> None:
        while not self.is_done:
            was_closing = self.world.is_closing
            found = [await self.read_offset(partition) for partition in range(self.world.partitions)]
            self.is_done = was_closing and None not in found
            await asyncio.sleep(self.loop.between(0.1, 0.4))


class GroupMember(GroupClient, ABC):
    """Works through the partitions that it owns, and commits one offset after the other."""

    def __init__(self, world: ConsumerWorld, number: int, instance_id: str | None) -> None:
        super().__init__(world, number)
        self.instance_id = instance_id
        self.member_id = ""
        self.epoch = -1
        self.owned: set[int] = set()
        self.has_lost_join = False
        self.heard_at: float | None = None
        #: It has left, was fenced for good, or has crashed.
        self.is_over = False
        self.is_leaving = False
        self._positions: dict[int, int] = {}
        self.ownership.members.append(self)

    def __repr__(self) -> str:
        name = f"{type(self).__name__} {self.number} {self.member_id} {self.instance_id or ''}"
        return f"<{name} epoch {self.epoch} {sorted(self.owned)}>"

    @property
    @abstractmethod
    def is_member(self) -> bool:
        """Whether it may commit."""

    @abstractmethod
    async def _step(self) -> None:
        """Join, or send a heartbeat, and act on the response."""

    @abstractmethod
    async def _leave(self) -> bool:
        """Return True once the coordinator has confirmed it."""

    async def run(self) -> None:
        while not self.is_leaving and not self.is_over:
            await self._step()
            self.ownership.watch_clocks()
            for _ in range(self.loop.draw(3)):
                if self.is_member and self.owned:
                    await self._work()
        if self.is_over:
            return
        self._lose_all()
        self.counts["members left"] += 1
        for _ in range(_LEAVE_ATTEMPTS):
            if await self._leave():
                break
        self.is_over = True

    def crash(self) -> None:
        self.loop.note("member crashes", repr(self))
        self.loop.end(self.process)
        self.cluster.network.process_ended(self.process)
        self.owned.clear()
        self.is_over = True

    # -- partitions ------------------------------------------------------------------------------------

    def _take(self, wanted: set[int]) -> bool:
        """Let go first, then take. Return True if anything has changed."""
        if wanted == self.owned:
            return False
        self.owned &= wanted
        for partition in sorted(wanted - self.owned):
            self.ownership.takes(self, partition)
            self.owned.add(partition)
            self._positions.pop(partition, None)
            self.counts["partitions taken"] += 1
        self.loop.note("owns", repr(self))
        return True

    def _lose_all(self) -> None:
        self.owned.clear()
        self._positions.clear()

    def _fenced(self, error: ErrorCode) -> None:
        """Another member may own what it owned."""
        self.loop.note("fenced", repr(self), error.name)
        self.counts["members fenced"] += 1
        if error is ErrorCode.unknown_member_id:
            self.ownership.fenced(self, SESSION_S)
        self.heard_at = None
        self._lose_all()

    # -- offsets ---------------------------------------------------------------------------------------

    async def _work(self) -> None:
        owned = sorted(self.owned)
        partition = owned[self.loop.draw(len(owned))]
        position = self._positions.get(partition)
        if position is None:
            found = await self._read(partition)
            if found is not None and partition in self.owned:
                self._positions[partition] = found
            return
        commit = self.ownership.new_commit(self, partition, position + 1)
        error = await self._commit(commit)
        if error is ErrorCode.none:
            self.ownership.accepted(commit)
            self.counts["offsets committed"] += 1
            if partition in self.owned:
                self._positions[partition] = commit.offset
            return
        if error in _REFUSED:
            self.ownership.refused(commit)
            self.counts["commits refused"] += 1
        # It does not know the position any more.
        self._positions.pop(partition, None)

    async def _read(self, partition: int) -> int | None:
        return await self.read_offset(partition)

    async def _commit(self, commit: Commit) -> ErrorCode | None:
        new = message(OFFSET_COMMIT, 9)
        part = new(
            "OffsetCommitRequestPartition",
            partition_index=commit.partition,
            committed_offset=commit.offset,
            committed_leader_epoch=-1,
            committed_metadata=str(commit.serial),
        )
        request = new(
            "OffsetCommitRequest",
            group_id=GROUP,
            generation_id_or_member_epoch=commit.epoch,
            member_id=commit.member_id,
            group_instance_id=self.instance_id,
            topics=(new("OffsetCommitRequestTopic", name=TOPIC, partitions=(part,)),),
        )
        reply = await self.ask(OFFSET_COMMIT, 9, request)
        if reply is None:
            return None
        error = ErrorCode(reply.topics[0].partitions[0].error_code)
        if error in _MOVED:
            self._coordinator = -1
        return error


class ConsumerMember(GroupMember):
    def __init__(self, world: ConsumerWorld, number: int, instance_id: str | None) -> None:
        super().__init__(world, number, instance_id)
        self.member_id = f"m{number}"
        self.epoch = JOIN_GROUP_MEMBER_EPOCH
        #: Whether the last request was answered; if not, the next one has all fields.
        self._is_sure = False
        #: Whether it reports its partitions with every heartbeat, or only when they have changed.
        self._is_brief = self.loop.chance(0.5)
        self._reported: set[int] | None = None
        #: The assignment that it is about to act on, while it goes on sending heartbeats.
        self._wanted: set[int] | None = None

    @property
    def is_member(self) -> bool:
        return self.epoch > 0

    def _lose_all(self) -> None:
        super()._lose_all()
        self._wanted = None

    async def _read(self, partition: int) -> int | None:
        return await self.read_offset(partition, self.member_id, self.epoch)

    async def _step(self) -> None:
        sent_at, joins = self.loop.now, self.epoch == JOIN_GROUP_MEMBER_EPOCH
        reply = await self._beat(self.epoch)
        self._is_sure = reply is not None and reply.error_code == ErrorCode.none
        if reply is None:
            self._reported = None
            if joins:
                self._lost_join()
            return
        if reply.error_code != ErrorCode.none:
            await self._refused(ErrorCode(reply.error_code))
            return
        self.heard_at = sent_at
        if reply.member_epoch != self.epoch:
            self.epoch = int(reply.member_epoch)
            self.counts["epochs reached"] += 1
        if reply.assignment is not None:
            wanted = {number for topic in reply.assignment.topic_partitions for number in topic.partitions}
            if self.loop.chance(0.4):
                self._wanted = wanted
                self.spawn(self._take_later(wanted))
            else:
                self._wanted = None
                if self._take(wanted):
                    return
        await asyncio.sleep(self.loop.between(*_BEAT_S))

    async def _take_later(self, wanted: set[int]) -> None:
        """Callbacks of an application take their time."""
        await asyncio.sleep(self.loop.between(*((0.2, 1.0) if self.loop.chance(0.3) else (0.001, 0.15))))
        if self._wanted is wanted:
            self._wanted = None
            self._take(wanted)

    def _lost_join(self) -> None:
        """Join again, or start over as another member."""
        if self.instance_id is None and self.loop.chance(0.5):
            self.member_id += "+"
        else:
            self.has_lost_join = True

    async def _beat(self, epoch: int) -> Any:
        new = message(CONSUMER_GROUP_HEARTBEAT, 1)
        is_full = epoch == JOIN_GROUP_MEMBER_EPOCH or not self._is_sure
        is_known = self._is_brief and self._reported == self.owned and not is_full
        owned = tuple(sorted(self.owned))
        partitions = (
            (new("TopicPartitions", topic_id=self.world.topic_id, partitions=owned),) if owned else ()
        )
        self._reported = set(self.owned)
        request = new(
            "ConsumerGroupHeartbeatRequest",
            group_id=GROUP,
            member_id=self.member_id,
            member_epoch=epoch,
            instance_id=self.instance_id,
            rack_id=None,
            rebalance_timeout=timedelta(seconds=_REBALANCE_S) if is_full else timedelta(milliseconds=-1),
            subscribed_topic_names=(TOPIC,) if is_full else None,
            subscribed_topic_regex=None,
            server_assignor=None,
            topic_partitions=None if is_known else partitions,
        )
        return await self.ask(CONSUMER_GROUP_HEARTBEAT, 1, request)

    async def _refused(self, error: ErrorCode) -> None:
        self._reported = None
        if error is ErrorCode.fenced_instance_id:
            self._fenced(error)
            self.is_over = True
        elif error in (
            ErrorCode.unknown_member_id,
            ErrorCode.fenced_member_epoch,
            ErrorCode.group_id_not_found,
        ):
            self._fenced(error)
            self.epoch = JOIN_GROUP_MEMBER_EPOCH
        else:
            self.loop.note("member refused", repr(self), error.name)
        await self.back_off()

    async def _leave(self) -> bool:
        """For good, or for a while if it is static."""
        for_a_while = self.instance_id is not None and self.loop.chance(0.7)
        reply = await self._beat(LEAVE_GROUP_STATIC_MEMBER_EPOCH if for_a_while else LEAVE_GROUP_MEMBER_EPOCH)
        return reply is not None


class ClassicMember(GroupMember):
    """Lets go of all its partitions before it joins again, or, if it is cooperative, of those that others get."""

    _is_joined = False

    @property
    def is_member(self) -> bool:
        return self._is_joined

    async def _step(self) -> None:
        if not self._is_joined:
            joined = await self._join()
            if joined is not None:
                await self._sync(joined)
            return
        await asyncio.sleep(self.loop.between(*_BEAT_S))
        new = message(HEARTBEAT, 4)
        request = new(
            "HeartbeatRequest",
            group_id=GROUP,
            generation_id=self.epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
        )
        sent_at = self.loop.now
        reply = await self.ask(HEARTBEAT, 4, request)
        if reply is None:
            return
        if reply.error_code == ErrorCode.none:
            self.heard_at = sent_at
        else:
            await self._refused(ErrorCode(reply.error_code))

    async def _join(self) -> Any:
        if not self.world.is_cooperative:
            self._lose_all()
        new = message(JOIN_GROUP, 9)
        request = new(
            "JoinGroupRequest",
            group_id=GROUP,
            session_timeout=timedelta(seconds=SESSION_S),
            rebalance_timeout=timedelta(seconds=_REBALANCE_S),
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            protocol_type="consumer",
            protocols=(
                new("JoinGroupRequestProtocol", name=self.world.assignor, metadata=self._subscription()),
            ),
            reason=None,
        )
        reply = await self.ask(JOIN_GROUP, 9, request, timeout_s=_JOIN_S)
        if reply is None:
            if self.instance_id is None and self.loop.chance(0.5):
                self._lose_all()
                self.member_id = ""
            else:
                self.has_lost_join = True
            return None
        if reply.error_code == ErrorCode.member_id_required:
            self.member_id = reply.member_id
            return None
        if reply.error_code != ErrorCode.none:
            await self._refused(ErrorCode(reply.error_code))
            return None
        self.member_id = reply.member_id
        return reply

    def _subscription(self) -> bytes:
        topic = struct.pack(">h", len(TOPIC)) + TOPIC.encode()
        owned = sorted(self.owned)
        partitions = struct.pack(f">i{len(owned)}i", len(owned), *owned)
        owned_topics = struct.pack(">i", 1) + topic + partitions if owned else struct.pack(">i", 0)
        return struct.pack(">hi", 1, 1) + topic + struct.pack(">i", -1) + owned_topics

    async def _sync(self, joined: Any) -> None:
        new = message(SYNC_GROUP, 5)
        assignments = ()
        if joined.leader == self.member_id and not joined.skip_assignment:
            assignments = tuple(
                new("SyncGroupRequestAssignment", member_id=member_id, assignment=encode_assignment(share, 1))
                for member_id, share in self._assign(joined).items()
            )
        request = new(
            "SyncGroupRequest",
            group_id=GROUP,
            generation_id=joined.generation_id,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            protocol_type=joined.protocol_type,
            protocol_name=joined.protocol_name,
            assignments=assignments,
        )
        sent_at = self.loop.now
        reply = await self.ask(SYNC_GROUP, 5, request, timeout_s=_JOIN_S)
        if reply is None:
            return
        if reply.error_code != ErrorCode.none:
            await self._refused(ErrorCode(reply.error_code))
            return
        self.heard_at = sent_at
        self.epoch = int(joined.generation_id)
        self.ownership.confirmed(self)
        self.counts["generations joined"] += 1
        wanted = {number for _, numbers in parse_assignment(reply.assignment) for number in numbers}
        # Others get what it lets go of only once all have joined again.
        self._is_joined = self.owned <= wanted
        self._take(wanted)

    def _assign(self, joined: Any) -> dict[str, list[tuple[str, list[int]]]]:
        """Everybody keeps what it owns, up to its share; partitions that a member has to let go of stay free."""
        share = -(-self.world.partitions // len(joined.members))
        assigned: dict[str, list[int]] = {}
        free = dict.fromkeys(range(self.world.partitions))
        for member in joined.members:
            owned = [
                number
                for _, numbers in parse_subscription(member.metadata).owned
                for number in numbers
                if number in free
            ]
            assigned[member.member_id] = owned[:share]
            for number in owned:
                del free[number]
        for number in free:
            fewest = min(assigned, key=lambda member_id: len(assigned[member_id]))
            assigned[fewest].append(number)
        return {member_id: [(TOPIC, sorted(numbers))] for member_id, numbers in assigned.items()}

    async def _refused(self, error: ErrorCode) -> None:
        if error is ErrorCode.fenced_instance_id:
            self._fenced(error)
            self.is_over = True
        elif error in (ErrorCode.unknown_member_id, ErrorCode.illegal_generation):
            self._fenced(error)
        else:
            self.loop.note("member refused", repr(self), error.name)
        if error is ErrorCode.unknown_member_id:
            self.member_id = ""
        self._is_joined = False
        await self.back_off()

    async def _leave(self) -> bool:
        """A static member goes without a word, as Kafka's client does, and comes back within its session or not."""
        if self.instance_id is not None and self.loop.chance(0.7):
            return True
        new = message(LEAVE_GROUP, 5)
        identity = new(
            "MemberIdentity", member_id=self.member_id, group_instance_id=self.instance_id, reason=None
        )
        request = new("LeaveGroupRequest", group_id=GROUP, members=(identity,))
        return await self.ask(LEAVE_GROUP, 5, request) is not None


class ConsumerWorld(World):
    settings: ClassVar[Mapping[str, str]] = {
        "group.min.session.timeout.ms": "50",
        "group.consumer.min.session.timeout.ms": "50",
        "group.consumer.session.timeout.ms": str(int(SESSION_S * 1000)),
        "group.consumer.min.heartbeat.interval.ms": "10",
        "group.consumer.heartbeat.interval.ms": "100",
        "group.consumer.assignment.interval.ms": "30",
    }

    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        super().__init__(cluster, committed)
        self.partitions = 2 + self.loop.draw(3)
        self.ownership = Ownership(committed, GROUP, TOPIC)
        self.topic_id: Any = None
        kinds: tuple[tuple[type[GroupMember], ...], ...] = (
            (ConsumerMember,),
            (ConsumerMember,),
            (ClassicMember,),
            (ConsumerMember, ClassicMember),
            (ConsumerMember, ClassicMember),
        )
        self._kinds = kinds[self.loop.draw(len(kinds))]
        #: How classic members rebalance.
        self.is_cooperative = self.loop.chance(0.5)
        self.assignor = "cooperative-sticky" if self.is_cooperative else "range"
        self.members: list[GroupMember] = []
        self._reader = Reader(self, 1)
        self._has_begun = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        with self.ownership.observing():
            yield

    @property
    def topics(self) -> tuple[TopicShape, ...]:
        return (TopicShape(TOPIC, self.partitions),)

    @property
    def alive(self) -> list[GroupMember]:
        return [member for member in self.members if not member.is_over and not member.is_leaving]

    @property
    def clients(self) -> list[Client]:
        return [*self.alive, self._reader]

    def begin(self) -> None:
        self.topic_id = self.cluster.image.topics[TOPIC].id
        for _ in range(2):
            self._join()
        self._reader.spawn(self._reader.run())
        self.admin.spawn(self._run())

    async def _run(self) -> None:
        """Let members come and go."""
        while True:
            await asyncio.sleep(self.loop.between(0.02, 0.3))
            alive, kind = self.alive, self.loop.draw(100)
            if self.is_closing or not self.has_begun:
                if not alive:
                    self._join()
            elif kind < 25 and len(alive) < _MEMBERS_MAX:
                self._join()
            elif kind < 45 and len(alive) > 1:
                leaving = alive[self.loop.draw(len(alive))]
                leaving.is_leaving = True
                self._return_later(leaving)
            elif kind < 55 and len(alive) > 1:
                crashing = alive[self.loop.draw(len(alive))]
                crashing.crash()
                self._return_later(crashing)
            elif kind < 65:
                self._suspend(alive[self.loop.draw(len(alive))])

    def _return_later(self, member: GroupMember) -> None:
        """A static member that goes often comes back within its session."""
        if member.instance_id is not None and self.loop.chance(0.7):
            self.admin.spawn(self._return(member))

    async def _return(self, member: GroupMember) -> None:
        await asyncio.sleep(self.loop.between(0.02, 0.3))
        if not self.is_closing and member.is_over:
            taken = {each.instance_id for each in self.members if not each.is_over}
            if member.instance_id not in taken:
                self._add(member.instance_id)

    def _suspend(self, member: GroupMember) -> None:
        if not member.process.is_suspended:
            self.loop.note("member is suspended", repr(member))
            self.loop.suspend(member.process)
            self.admin.spawn(self._resume(member))

    async def _resume(self, member: GroupMember) -> None:
        await asyncio.sleep(self.loop.between(0.1, 1.2))
        if not member.is_over:
            self.loop.resume(member.process)

    def _join(self) -> None:
        """Add a member, dynamic, or static under a name that no living member uses."""
        taken = {member.instance_id for member in self.members if not member.is_over}
        free = [name for name in _INSTANCES if name not in taken]
        self._add(free[0] if free and self.loop.chance(0.5) else None)

    def _add(self, instance_id: str | None) -> None:
        kind = self._kinds[self.loop.draw(len(self._kinds))]
        member = kind(self, 10 + len(self.members), instance_id)
        self.loop.note("member joins", repr(member))
        self.members.append(member)
        member.spawn(member.run())

    @property
    def has_begun(self) -> bool:
        covered = {partition for member in self.alive for partition in member.owned}
        self._has_begun |= len(covered) == self.partitions and self.counts["offsets committed"] >= 3
        return self._has_begun

    def unfinished(self) -> str | None:
        alive, ids = self.alive, self.ownership.member_ids()
        if ids != sorted(member.member_id for member in alive):
            return f"the group has {ids}, of which {alive} are alive: {self.ownership.group}"
        owned = sorted(partition for member in alive for partition in member.owned)
        if owned != list(range(self.partitions)):
            return f"{alive} own {owned} of {self.partitions} partitions: {self.ownership.group}"
        return None if self._reader.is_done else "the offsets were not read again"
