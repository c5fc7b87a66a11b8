"""A streams group with clients that behave as Kafka Streams does; requests and replies may be lost."""

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from penstock.groups.group import GroupResult
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH, LEAVE_GROUP_MEMBER_EPOCH
from penstock.groups.streams.streams_group import StreamsGroup, StreamsHeartbeatReply, StreamsHeartbeatRequest
from penstock.groups.streams.streams_heartbeat import streams_group_heartbeat
from penstock.groups.streams.topology import (
    NO_TASK_SETS,
    CopartitionGroup,
    Endpoint,
    InternalTopic,
    Subtopology,
    TaskSets,
    Topology,
)
from penstock.groups.topics import Topic
from penstock.protocol.errors import ErrorCode

GROUP = "g"
SESSION_MS, REBALANCE_MS = 45_000, 300_000
#: Reads two topics, repartitions what it read, and counts by key.
COUNTING = Topology(
    0,
    (
        Subtopology("0", source_topics=("clicks", "views"), repartition_sink_topics=("g-repartition",)),
        Subtopology(
            "1",
            repartition_source_topics=(
                InternalTopic("g-repartition", configs=(("cleanup.policy", "delete"),)),
            ),
            changelog_topics=(InternalTopic("g-changelog", configs=(("cleanup.policy", "compact"),)),),
            copartition_groups=(CopartitionGroup(repartition_source_topics=(0,)),),
        ),
    ),
)


class FakeTopics:
    def __init__(self, **partitions: int) -> None:
        self.version = 0
        self._topics: dict[str, Topic] = {}
        for name, count in partitions.items():
            self.put(name, count)

    def put(self, name: str, partitions: int) -> None:
        self.version += 1
        self._topics[name] = Topic(name, UUID(int=len(self._topics) + 1), (frozenset(),) * partitions)

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, id: UUID) -> Topic | None:
        return next((topic for topic in self._topics.values() if topic.id == id), None)

    def names(self) -> Collection[str]:
        return self._topics


@dataclass
class Client:
    """One thread of an application: it owns tasks until it has revoked them, whatever the coordinator thinks."""

    member_id: str
    process_id: str
    topology: Topology = COUNTING
    endpoint: Endpoint | None = None
    epoch: int = JOIN_GROUP_MEMBER_EPOCH
    owned: TaskSets = NO_TASK_SETS
    assigned: TaskSets = NO_TASK_SETS
    is_member: bool = False
    last: StreamsHeartbeatReply | None = None
    #: The tasks it last reported: it says nothing of them until they change, or a reply was lost.
    reported: TaskSets | None = None

    def settle(self, *, take: bool) -> None:
        """Revokes what is no longer assigned; takes what is new, which a busy client may do later."""
        self.owned = self.owned.shared_with(self.assigned)
        if take:
            self.owned = self.assigned


@dataclass
class World:
    topics: FakeTopics = field(default_factory=lambda: FakeTopics(clicks=4, views=2))
    standby_replicas: int = 0
    initial_delay_ms: int = 0
    interval_ms: int = 0
    now_ms: int = 1_000
    clients: dict[str, Client] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = GroupCoordinatorConfig(streams_session_timeout_ms=SESSION_MS)
        self.shard = GroupCoordinatorShard(self.settings, self.topics)
        self.log: list[tuple[bytes, bytes | None]] = []

    @property
    def group(self) -> StreamsGroup:
        group = self.shard.groups[GROUP]
        assert isinstance(group, StreamsGroup)
        return group

    def client(self, member_id: str, process_id: str = "", **more: object) -> Client:
        return self.clients.setdefault(member_id, Client(member_id, process_id or member_id, **more))  # type: ignore[arg-type]

    def beat(
        self, client: Client, *, reply_lost: bool = False, take: bool = True, **more: object
    ) -> StreamsHeartbeatReply:
        joins = client.epoch == JOIN_GROUP_MEMBER_EPOCH
        owned = NO_TASK_SETS if joins else client.owned
        request = StreamsHeartbeatRequest(
            group_id=GROUP,
            member_id=client.member_id,
            member_epoch=client.epoch,
            endpoint_epoch=0 if client.last is None else client.last.endpoint_epoch,
            rebalance_timeout_ms=REBALANCE_MS if joins else -1,
            topology=client.topology if joins else None,
            owned=owned if joins or owned != client.reported else None,
            process_id=client.process_id if joins else None,
            endpoint=client.endpoint if joins else None,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=5_000,
            assignment_interval_ms=self.interval_ms,
            initial_rebalance_delay_ms=self.initial_delay_ms,
            standby_replicas=self.standby_replicas,
            **more,  # type: ignore[arg-type]
        )
        client.reported = None if reply_lost else owned
        (reply,) = self.perform(streams_group_heartbeat(self.shard, request, "token", now_ms=self.now_ms))
        if not reply_lost:
            self._hear(client, reply, take=take)
        return reply

    def leave(self, client: Client) -> None:
        client.epoch = LEAVE_GROUP_MEMBER_EPOCH
        self.beat(client)
        client.epoch, client.is_member, client.owned, client.assigned = (
            JOIN_GROUP_MEMBER_EPOCH,
            False,
            NO_TASK_SETS,
            NO_TASK_SETS,
        )

    def _hear(self, client: Client, reply: StreamsHeartbeatReply, *, take: bool) -> None:
        client.last = reply
        if reply.error is not ErrorCode.none:
            client.reported = None
        if reply.error in (ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id):
            client.epoch, client.owned, client.assigned, client.is_member = (
                JOIN_GROUP_MEMBER_EPOCH,
                NO_TASK_SETS,
                NO_TASK_SETS,
                False,
            )
            return
        if reply.error is ErrorCode.none and reply.member_epoch >= 0:
            client.is_member = True
            client.epoch = reply.member_epoch
            if reply.assigned is not None:
                client.assigned = reply.assigned
            client.settle(take=take)

    def perform(self, work: GroupResult) -> list[StreamsHeartbeatReply]:
        for key, value in work.records:
            self.log.append((key, value))
            self.shard.replay(key, value)
        return [reply for _, reply in work.replies]  # type: ignore[misc]

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        while (deadline_ms := self.shard.next_deadline_ms()) is not None and deadline_ms <= self.now_ms:
            self.perform(self.shard.tick(self.now_ms))

    def reload(self) -> None:
        """Another node becomes the coordinator."""
        loaded = GroupCoordinatorShard(self.settings, self.topics)
        for key, value in self.log:
            loaded.replay(key, value)
        assert loaded.stored() == self.shard.stored()
        self.shard = loaded
        self.perform(loaded.loaded(self.now_ms))

    def create_internal_topics(self) -> None:
        for topic in self.group.configured.missing_topics if self.group.configured else ():
            self.topics.put(topic.name, topic.partitions)

    def check(self) -> None:
        """No task is active at two members, and no process has a task twice, in the view of the clients.

        A client may take a task at any time after it has heard of it, so what it was assigned counts as its own.
        """
        active: dict[tuple[str, int], str] = {}
        in_process: dict[tuple[str, tuple[str, int]], str] = {}
        for client in self.clients.values():
            if client.member_id not in self.group.members:
                continue  # it was removed, and will hear of it
            held = client.owned.merged(client.assigned)
            for task in TaskSets(active=held.active).every():
                assert task not in active, f"{task} is active at {active[task]} and {client.member_id}"
                active[task] = client.member_id
            for task in held.every():
                place = (client.process_id, task)
                other = in_process.get(place, client.member_id)
                assert other == client.member_id, f"{task} is at {other} and {client.member_id}"
                in_process[place] = client.member_id

    def converge(self) -> None:
        """Everybody is heard, often enough for everything that must be revoked to be revoked."""
        for _ in range(8):
            self.pass_time(1_000)
            for client in self.clients.values():
                if client.epoch != JOIN_GROUP_MEMBER_EPOCH or client.is_member:
                    self.beat(client)
                    self.check()
            self.create_internal_topics()
