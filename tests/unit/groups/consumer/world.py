"""A shard with a log, and clients of both protocols that take what they are told at their own pace.

A client holds a partition from when it hears of it until it has let go of it: it may use what it was told whenever it
likes. The world checks after every event that no two clients that are in the group hold the same one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.classic.classic_group_data import ClassicGroupState
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.consumer.consumer_heartbeat import consumer_group_heartbeat
from penstock.groups.consumer.membership import ConsumerHeartbeatReply, ConsumerHeartbeatRequest
from penstock.groups.embedded_protocol import encode_assignment, parse_assignment, parse_subscription
from penstock.groups.group import (
    CommitRequest,
    GroupResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    to_assignment,
)
from penstock.groups.topics import Topic
from penstock.protocol.errors import ErrorCode

GROUP = "g"
SESSION_MS = 10_000
HEARTBEAT_MS = 1_000
REBALANCE_MS = 30_000
Place = tuple[UUID, int]


class FakeTopics:
    def __init__(self) -> None:
        self.version = 0
        self._topics: dict[str, Topic] = {}
        self._made = 0

    def set(self, name: str, partitions: int, racks: tuple[str, ...] = ()) -> None:
        """No partitions: no topic. Fewer than before: another topic of the same name."""
        old = self._topics.pop(name, None)
        self.version += 1
        if partitions:
            self._made += 1
            is_same = old is not None and old.partition_count <= partitions
            topic_id = old.id if is_same and old is not None else UUID(int=self._made << 64)
            spread = tuple(
                frozenset(racks[n % len(racks) :][:1]) if racks else frozenset() for n in range(partitions)
            )
            self._topics[name] = Topic(name, topic_id, spread)

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, id: UUID) -> Topic | None:
        return next((topic for topic in self._topics.values() if topic.id == id), None)

    def names(self) -> list[str]:
        return list(self._topics)

    def places(self, names: Any) -> set[Place]:
        found = (self._topics[name] for name in names if name in self._topics)
        return {(topic.id, number) for topic in found for number in range(topic.partition_count)}


class World:
    def __init__(self, settings: GroupCoordinatorConfig, topics: FakeTopics) -> None:
        self.settings, self.topics = settings, topics
        self.shard = GroupCoordinatorShard(settings, topics)
        self.log: list[tuple[bytes, bytes | None]] = []
        #: Where the log may end: records that were decided on together are written together.
        self.ends = [0]
        self.now_ms = 0
        self.clients: list[Client] = []
        self.waiting: dict[object, Callable[[Any], None]] = {}
        #: Whose a partition is in a consumer group, and at which epoch it became so.
        self.since: dict[Place, tuple[str, int]] = {}
        self.assignment_interval_ms = 0
        #: What the last leader of a classic group assigned: the topics subscribed to, and their partitions.
        self.last_assigned: tuple[set[str], set[Place]] = (set(), set())
        self._ids = 0
        self.apply(self.shard.loaded(0))

    def fresh_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}-{self._ids}"

    # Operations

    def ask(
        self, operation: Callable[[object], GroupResult], hear: Callable[[Any], None], *, lost: str = ""
    ) -> None:
        """`lost`: the reply, or (with the coordinator, before it is committed) what was decided."""
        self._ids += 1
        token = self._ids
        self.waiting[token] = (lambda _: None) if lost else hear
        work = operation(token)
        if lost == "decision":
            self.reload()
        else:
            self.apply(work)

    def apply(self, work: GroupResult) -> None:
        for key, value in work.records:
            self.log.append((key, value))
            self.shard.replay(key, value)
        self.ends.append(len(self.log))
        for token, reply in work.replies:
            self.waiting.pop(token)(reply)
        self.check()

    def advance(self, by_ms: int) -> None:
        target_ms = self.now_ms + by_ms
        while (due_ms := self.shard.next_deadline_ms()) is not None and due_ms <= target_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.apply(self.shard.tick(self.now_ms))
        self.now_ms = target_ms

    def reload(self, compacted: bool = False) -> None:
        log = compact(self.log) if compacted else self.log
        self.shard = GroupCoordinatorShard(self.settings, self.topics)
        for key, value in log:
            self.shard.replay(key, value)
        waiting, self.waiting = self.waiting, {}
        for client in self.clients:
            client.cut_off(set(waiting))
        self.apply(self.shard.loaded(self.now_ms))

    # What must hold

    @property
    def group(self) -> ConsumerGroup | ClassicGroup | None:
        return self.shard.groups.get(GROUP)  # type: ignore[return-value]

    def members(self) -> list[Client]:
        return [client for client in self.clients if client.is_alive and self.has_member(client)]

    def has_member(self, client: Client) -> bool:
        """Whether the coordinator still takes this client for a member: it is not fenced."""
        match self.group:
            case ConsumerGroup() as group:
                return client.member_id in group.members
            case ClassicGroup() as group:
                # In a classic group those of an earlier generation have nothing to say.
                return client.member_id in group.members and client.epoch == group.generation
            case _:
                return False

    def check(self) -> None:
        owners: dict[Place, Client] = {}
        for client in self.members():
            # Partitions of a deleted topic do not count.
            for place in client.holds() & self.topics.places(self.topics.names()):
                other = owners.setdefault(place, client)
                assert other is client, f"{place} is held by {other} and by {client}"
        group = self.group
        self.since = self._owned_since()
        if isinstance(group, ConsumerGroup):
            check_consistent(group)
            for place, client in owners.items():
                assert group.owners.get(place[0], {}).get(place[1]) == client.member_id, (
                    place,
                    client,
                    group,
                )

    def _owned_since(self) -> dict[Place, tuple[str, int]]:
        """A member that was away rejoins when it comes back."""
        found = {}
        for member in self.group.members.values() if isinstance(self.group, ConsumerGroup) else ():
            epoch = member.current.epoch
            for place in member.current.owned():
                owner, since = self.since.get(place, ("", 0))
                is_new = owner != member.member_id or since <= 0 or epoch <= 0
                found[place] = (member.member_id, epoch if is_new else since)
        return found

    def may_commit(self, client: Client, place: Place) -> bool:
        assert isinstance(self.group, ConsumerGroup)
        known = self.group.members[client.member_id].current.epoch
        owner, since = self.since.get(place, ("", 0))
        return client.epoch == known or (
            0 < client.epoch < known and owner == client.member_id and since <= client.epoch
        )


def check_consistent(group: ConsumerGroup) -> None:
    owners = {}
    for member in group.members.values():
        for place in member.current.owned():
            assert place not in owners, place
            owners[place] = member.member_id
        assert member.current.epoch <= max(group.target_epoch, 0), member
    assert owners == {(id, number): who for id, held in group.owners.items() for number, who in held.items()}
    assert set(group.targets) <= set(group.members)
    statics = {m.instance_id: m.member_id for m in group.members.values() if m.instance_id is not None}
    assert statics == group.static_ids
    assert group.target_epoch <= group.epoch


def compact(log: list[tuple[bytes, bytes | None]]) -> list[tuple[bytes, bytes | None]]:
    last = {key: place for place, (key, _) in enumerate(log)}
    return [
        (key, value) for place, (key, value) in enumerate(log) if last[key] == place and value is not None
    ]


class Client:
    """What both kinds have in common."""

    def __init__(
        self, world: World, name: str, topics: tuple[str, ...], instance_id: str | None = None
    ) -> None:
        self.world = world
        self.name = name
        self.topics = topics
        self.instance_id = instance_id
        self.member_id = ""
        self.epoch = 0
        self.is_alive = True
        self.owned: set[Place] = set()
        world.clients.append(self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.member_id} at {self.epoch}>"

    def holds(self) -> set[Place]:
        return self.owned

    def crash(self) -> None:
        """Its partitions have no owner; the coordinator does not know."""
        self.is_alive, self.owned = False, set()

    def cut_off(self, tokens: set[object]) -> None:
        """Requests that waited for the coordinator get no reply."""

    def commit(self) -> ErrorCode:
        places = tuple(OffsetToCommit(topic="t", partition=0, offset=1) for _ in range(1))
        request = CommitRequest(
            group_id=GROUP,
            member_id=self.member_id,
            generation=self.epoch,
            instance_id=self.instance_id,
            offsets=places,
        )
        replies: list[Any] = []
        world = self.world
        world.ask(lambda token: world.shard.commit(request, token, now_ms=world.now_ms), replies.append)
        (reply,) = replies
        error: ErrorCode = reply.error
        return error


class NewClient(Client):
    """Speaks the consumer protocol. It hears what it is to have, and takes it later."""

    def __init__(
        self,
        world: World,
        name: str,
        topics: tuple[str, ...],
        instance_id: str | None = None,
        regex: str | None = None,
        rack_id: str | None = None,
    ) -> None:
        super().__init__(world, name, topics, instance_id)
        self.member_id = world.fresh_id(name)
        self.told: set[Place] = set()
        self.regex, self.rack_id = regex, rack_id
        self.next_beat_in_ms = HEARTBEAT_MS
        self._sent: set[Place] | None = None

    def holds(self) -> set[Place]:
        return self.owned | self.told

    def crash(self) -> None:
        super().crash()
        self.told = set()

    def adopt(self) -> None:
        self.owned = set(self.told)

    def beat(self, *, lost: str = "", full: bool = False) -> None:
        joins = self.epoch == 0
        # What it has is said when it changed since it was last heard; who did not hear a reply says everything again.
        full = full or joins or self._sent is None
        owned = to_assignment(sorted(self.owned, key=str)) if full or self.owned != self._sent else None
        request = ConsumerHeartbeatRequest(
            group_id=GROUP,
            member_id=self.member_id,
            member_epoch=self.epoch,
            instance_id=self.instance_id,
            rack_id=self.rack_id,
            client_id=self.name,
            client_host="/host",
            rebalance_timeout_ms=REBALANCE_MS if full else -1,
            topic_names=self.topics if full else None,
            topic_regex=self.regex if full else None,
            owned=owned,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            assignment_interval_ms=self.world.assignment_interval_ms,
        )
        said = set(self.owned)
        self._sent = None if lost else said
        self._ask(request, self._hear, lost)

    def leave(self, *, away: bool = False) -> None:
        request = ConsumerHeartbeatRequest(
            group_id=GROUP,
            member_id=self.member_id,
            member_epoch=LEAVE_GROUP_STATIC_MEMBER_EPOCH if away else LEAVE_GROUP_MEMBER_EPOCH,
            instance_id=self.instance_id,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )
        self.crash()
        self._ask(request, lambda _: None, "")

    def _ask(self, request: ConsumerHeartbeatRequest, hear: Callable[[Any], None], lost: str) -> None:
        world = self.world
        world.ask(
            lambda token: consumer_group_heartbeat(world.shard, request, token, now_ms=world.now_ms),
            hear,
            lost=lost,
        )

    def _hear(self, reply: ConsumerHeartbeatReply) -> None:
        if reply.error in (ErrorCode.unreleased_instance_id, ErrorCode.group_max_size_reached):
            return
        if reply.error is not ErrorCode.none:
            known = (
                ErrorCode.unknown_member_id,
                ErrorCode.fenced_member_epoch,
                ErrorCode.fenced_instance_id,
                ErrorCode.group_id_not_found,
            )
            assert reply.error in known, reply
            self.owned, self.told, self.epoch, self._sent = set(), set(), 0, None
            return
        self.epoch, self.next_beat_in_ms = reply.member_epoch, reply.heartbeat_interval_ms
        if reply.assigned is not None:
            self.told = {(id, number) for id, numbers in reply.assigned.items() for number in numbers}


class OldClient(Client):
    """Speaks the classic protocol: eager, or cooperative (it keeps what it has while it joins)."""

    def __init__(
        self,
        world: World,
        name: str,
        topics: tuple[str, ...],
        instance_id: str | None = None,
        *,
        cooperative: bool = False,
    ) -> None:
        super().__init__(world, name, topics, instance_id)
        self.cooperative = cooperative
        self.epoch = -1
        self.step = "join"
        #: As the leader of a classic group: the topics that the group subscribes to, and the partitions assigned.
        self._led: tuple[set[str], set[Place]] | None = None
        self._token: object = None

    def crash(self) -> None:
        super().crash()
        self.step = "dead"

    def cut_off(self, tokens: set[object]) -> None:
        if self.step.startswith("await"):
            self.step = "join"

    def move(self, *, lost: str = "") -> None:
        """The next thing that such a client does."""
        match self.step:
            case "join":
                self._join(lost)
            case "sync":
                self._sync((), lost)
            case "beat" if self._led is not None and self._led[1] != self.world.topics.places(self._led[0]):
                # The leader sees in its metadata that partitions were added or deleted, and has them assigned again.
                self._join(lost)
            case "beat":
                self._beat(lost)

    def leave(self) -> None:
        request = LeaveRequest(
            group_id=GROUP, members=(LeavingMember(member_id=self.member_id, instance_id=self.instance_id),)
        )
        self.crash()
        world = self.world
        world.ask(lambda token: world.shard.leave(request, token, now_ms=world.now_ms), lambda _: None)

    def _metadata(self) -> bytes:
        names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in self.topics)
        data = struct.pack(">hi", 1, len(self.topics)) + names + struct.pack(">i", -1)
        owned: dict[str, list[int]] = {}
        for topic_id, number in sorted(self.owned, key=str):
            topic = self.world.topics.by_id(topic_id)
            if topic is not None:
                owned.setdefault(topic.name, []).append(number)
        return data + encode_assignment(owned.items(), 1)[2:-4]

    def _join(self, lost: str) -> None:
        if not self.cooperative:
            self.owned = set()
        world = self.world
        request = JoinRequest(
            group_id=GROUP,
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self.name,
            client_host="/host",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            protocol_type="consumer",
            protocols=(("range", self._metadata()),),
        )
        new_id = world.fresh_id(self.name)
        self.step = "await join"
        if lost:
            # Its connection broke; it will try again.
            self.step = "join"
        world.ask(
            lambda token: world.shard.join(request, token, now_ms=world.now_ms, new_member_id=new_id),
            self._joined,
            lost=lost,
        )

    def _joined(self, reply: JoinReply) -> None:
        if not self.is_alive:
            return
        world = self.world
        self.step = "join"
        match reply.error:
            case ErrorCode.member_id_required:
                self.member_id = reply.member_id
            case ErrorCode.none:
                self.member_id, self.epoch, self.step = reply.member_id, reply.generation, "sync"
                self._led = None
                if reply.skip_assignment:
                    # The leader of a real group takes its present metadata for what was assigned (KIP-814), so that
                    # it misses what changed while it was away. This one knows better: every history must settle.
                    self._led = world.last_assigned
                elif reply.leader == self.member_id:
                    self._sync(self._assign(reply), "")
            case ErrorCode.rebalance_in_progress:
                self.member_id = reply.member_id or self.member_id
            case error:
                known = (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id)
                assert error in known, reply
                self._forget()

    def _forget(self) -> None:
        self.member_id, self.epoch, self.step, self.owned = "", -1, "join", set()

    def _assign(self, reply: JoinReply) -> tuple[tuple[str, bytes], ...]:
        """Round robin; what another one says it still has, its next owner gets in the next generation."""
        wanted = {member.member_id: parse_subscription(member.metadata) for member in reply.members}
        owners = {
            (topic, number): member_id
            for member_id, subscription in wanted.items()
            for topic, numbers in subscription.owned
            for number in numbers
        }
        given: dict[str, dict[str, list[int]]] = {member_id: {} for member_id in wanted}
        names = {topic for each in wanted.values() for topic in each.topics}
        self._led = self.world.last_assigned = names, self.world.topics.places(names)
        for topic_name in sorted(names):
            topic = self.world.topics.get(topic_name)
            takers = [member_id for member_id, each in wanted.items() if topic_name in each.topics]
            for number in range(0 if topic is None else topic.partition_count):
                taker = takers[number % len(takers)]
                if owners.get((topic_name, number), taker) == taker:
                    given[taker].setdefault(topic_name, []).append(number)
        return tuple((member_id, encode_assignment(each.items(), 1)) for member_id, each in given.items())

    def _sync(self, assignments: tuple[tuple[str, bytes], ...], lost: str) -> None:
        world = self.world
        request = SyncRequest(
            group_id=GROUP,
            generation=self.epoch,
            member_id=self.member_id,
            instance_id=self.instance_id,
            protocol_type="consumer",
            protocol="range",
            assignments=assignments,
        )
        self.step = "join" if lost else "await sync"
        world.ask(
            lambda token: world.shard.sync(request, token, now_ms=world.now_ms), self._synced, lost=lost
        )

    def _synced(self, reply: SyncReply) -> None:
        if not self.is_alive:
            return
        if reply.error is not ErrorCode.none:
            self._called(reply.error)
            return
        parsed = parse_assignment(reply.assignment)
        topics = self.world.topics
        told = {
            (topic.id, number)
            for name, numbers in parsed
            if (topic := topics.get(name)) is not None
            for number in numbers
        }
        # A member that had to give up partitions rejoins at once, so that others can have them.
        self.step = "join" if self.owned - told else "beat"
        self.owned = told

    def _beat(self, lost: str) -> None:
        world = self.world
        request = HeartbeatRequest(
            group_id=GROUP, generation=self.epoch, member_id=self.member_id, instance_id=self.instance_id
        )
        world.ask(
            lambda token: world.shard.heartbeat(request, token, now_ms=world.now_ms),
            lambda reply: self._called(reply.error),
            lost=lost,
        )

    def _called(self, error: ErrorCode) -> None:
        match error:
            case ErrorCode.none:
                pass
            case ErrorCode.rebalance_in_progress:
                self.step = "join"
            case ErrorCode.illegal_generation:
                # What it has belongs to an earlier time.
                self.owned, self.epoch, self.step = set(), -1, "join"
            case _:
                assert error in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id), error
                self._forget()


def is_settled(world: World) -> bool:
    """Everyone who lives has their part, and all that is subscribed to is somebody's."""
    group = world.group
    alive = [client for client in world.clients if client.is_alive]
    if not alive:
        return True
    if group is None or not all(world.has_member(client) for client in alive):
        return False
    if isinstance(group, ConsumerGroup) and group.state_name != "Stable":
        return False
    if isinstance(group, ClassicGroup) and group.state is not ClassicGroupState.STABLE:
        return False
    if any(isinstance(client, NewClient) and client.owned != client.told for client in alive):
        return False
    names = {name for client in alive for name in client.topics}
    names |= {
        n for client in alive if isinstance(client, NewClient) and client.regex for n in world.topics.names()
    }
    held = [place for client in alive for place in client.holds()]
    return set(held) == world.topics.places(names) and len(held) == len(set(held))


def settle(world: World, rounds: int = 60) -> None:
    """Without disturbance: all clients do as they are told, and none joins."""
    for _ in range(rounds):
        if is_settled(world):
            return
        for client in [client for client in world.clients if client.is_alive]:
            if isinstance(client, NewClient):
                client.beat()
                client.adopt()
            elif isinstance(client, OldClient):
                client.move()
        world.advance(1_000)
    raise AssertionError(f"not settled: {world.group} {world.clients} {[c.holds() for c in world.clients]}")
