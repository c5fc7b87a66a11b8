"""What the clients of a small world do, and when they have done enough."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.reassignment import Reassignment
from penstock.raft.values import Voter
from penstock.simulation.clients import CarelessProducer, Client, Consumer, Producer
from penstock.simulation.cluster import Cluster
from penstock.simulation.groups import OFFSETS_TOPIC
from penstock.simulation.members import GroupHistory, Member
from penstock.simulation.replica import Key

#: A run with fewer acknowledged records than this has proven nothing.
ACKNOWLEDGED_MIN: Final = 20


class TopicShape(NamedTuple):
    name: str
    partitions: int
    replication_factor: int
    isr_min: int
    flush: str = "ack"


class Admin(Client):
    """An operator who asks the controller for things."""

    def ask(self, kind: str, request: Any, on_reply: Any = None) -> None:
        nodes = self.cluster.running()
        leaders = [node.metadata.leader_id for node in nodes if node.metadata.leader_id > 0]
        if leaders:
            target = leaders[self.world.draw(len(leaders))]
            self.call(target, kind, request, lambda reply, _: None if on_reply is None else on_reply(reply))


class Workload:
    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...], *, pace_ms: int = 12) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.topics = topics
        self.pace_ms = pace_ms
        self.counts: Counter[str] = Counter()
        self.producers = [Producer(cluster, -1 - number, self.counts) for number in range(2)]
        self.careless = [
            CarelessProducer(cluster, -10, self.counts, acks_all=False),
            CarelessProducer(cluster, -11, self.counts, acks_all=True),
        ]
        self.consumer = Consumer(cluster, -20, self.counts)
        self.admin = Admin(cluster, -30, self.counts)
        self.history = GroupHistory(next(topic.partitions for topic in topics if topic.name == "orders"))
        self.members = [Member(cluster, -40 - number, self.counts, self.history) for number in range(2)]
        self.is_closing = False
        #: A voter has lost its disk: who removes another now has to blame himself.
        self.keeps_voters = False
        self._last_words: dict[tuple[int, Key], bool] = {}

    # --- beginning ---

    def start(self) -> None:
        self._create()

    def _create(self) -> None:
        wanted = [topic for topic in self.topics if topic.name not in self.cluster.invariants.image.topics]
        if not wanted:
            self._begin()
            return
        active = self.cluster.active_controller()
        if active is not None and len(active.image.active_brokers()) >= len(self.cluster.brokers):
            self.admin.ask("create_topics", tuple(new_topic(topic) for topic in wanted))
        self.admin.after(30, self._create)

    def _begin(self) -> None:
        for member in self.members:
            member.after(self.world.between(1, 50), member.join)
        self.admin.after(1, self._step)

    @property
    def has_begun(self) -> bool:
        """Everybody is at work: faults hit a cluster that is used."""
        if self.counts["records acknowledged"] < ACKNOWLEDGED_MIN // 2:
            return False
        return all(member.generation > 0 for member in self.members)

    # --- going on ---

    def _step(self) -> None:
        """One thing after the other, as chance has it."""
        world = self.world
        kind = world.draw(20)
        if self.is_closing:
            self.consumer.poll(self._any_partition())
            self._say_last_words()
            if self.counts["records acknowledged"] < ACKNOWLEDGED_MIN:
                self.producers[1].send(self._partition_of("orders", "plain"), 2)
        elif kind < 8:
            producer = self.producers[world.draw(len(self.producers))]
            producer.send(self._partition_of("orders", "plain"), world.between(1, 3))
        elif kind < 9:
            self.careless[0].send(self._partition_of("orders", "plain"), 1)
        elif kind < 11:
            self.careless[1].send(self._partition_of("fast", "plain"), 1)
        elif kind < 14:
            self.consumer.poll(self._any_partition())
        elif kind < 16:
            self.consumer.ask_latest(self._any_partition())
        elif kind < 19:
            for member in self.members:
                member.commit()
        else:
            self.members[world.draw(len(self.members))].read(world.draw(self.history.partitions))
        self.admin.after(world.between(1, 2 * self.pace_ms), self._step)

    def _partition_of(self, *names: str) -> Key:
        known = [topic for topic in self.topics if topic.name in names]
        topic = known[self.world.draw(len(known))] if known else self.topics[0]
        keys = self.cluster.partitions(topic.name)
        return keys[self.world.draw(len(keys))]

    def _any_partition(self) -> Key:
        topic = self.topics[self.world.draw(len(self.topics))]
        keys = self.cluster.partitions(topic.name)
        return keys[self.world.draw(len(keys))]

    # --- the operator ---

    def reassign(self) -> None:
        topic = self.topics[self.world.draw(len(self.topics))]
        brokers = self.cluster.brokers
        self.world.random.shuffle(brokers)
        replicas = tuple(brokers[: topic.replication_factor])
        item = Reassignment(topic=topic.name, partition=self.world.draw(topic.partitions), replicas=replicas)
        self.counts["reassignments asked"] += 1
        self.admin.ask("reassign", (item,))

    def register_copy(self, registration: BrokerRegistration, incarnation: int) -> None:
        self.admin.ask("register", registration._replace(incarnation=UUID(int=incarnation + 1)))

    def elect_preferred(self) -> None:
        self.admin.ask("elect", None)

    def change_voters(self) -> None:
        """Remove a voter, or add the controller that is none; machines that lost their disk do so themselves."""
        active = self.cluster.active_controller()
        if active is None or self.keeps_voters:
            return
        voters = active.quorum.core.voters.latest
        outside = [id for id in self.cluster.controllers if id not in voters]
        if outside:
            id = outside[self.world.draw(len(outside))]
            self.admin.ask("add_voter", Voter(self.cluster.replica_key(id)))
        elif len(voters) >= 3:
            # Two at once: one of them has to wait.
            for key in voters.keys[: 1 + self.world.draw(2)]:
                self.admin.ask("remove_voter", key)
        self.counts["voter changes asked"] += 1

    # --- ending ---

    def close(self) -> None:
        """Nothing new but one last record for every partition; what is under way is waited for."""
        self.is_closing = True
        for topic in self.topics:
            if topic.name in ("orders", "plain"):
                for key in self.cluster.partitions(topic.name):
                    self._last_words[-1, key] = False

    def _say_last_words(self) -> None:
        for (id, key), is_said in self._last_words.items():
            if not is_said:
                self._last_words[id, key] = self.producers[0].send(key, 1)

    def is_done(self) -> bool:
        return self.is_closing and self.unfinished() is None

    def unfinished(self) -> str | None:
        """What still has to happen before this run has shown that the cluster works again."""
        if self.counts["records acknowledged"] < ACKNOWLEDGED_MIN:
            return f"only {self.counts['records acknowledged']} records are acknowledged"
        if not all(self._last_words.values()) or any(
            producer.has_unacknowledged for producer in self.producers
        ):
            return "records of idempotent producers are not acknowledged"
        for topic in self.topics:
            for key in self.cluster.partitions(topic.name):
                if not self.consumer.has_read(key):
                    return f"committed records of {topic.name} {key} cannot be read"
                state = self.cluster.invariants.image.topics_by_id[key.topic_id].partitions[key.partition]
                if not state.has_leader or len(state.isr) < min(topic.isr_min, len(state.replicas)):
                    return f"{topic.name} {key} has leader {state.leader} and in-sync set {state.isr}"
        if not any(member.is_working for member in self.members):
            return "no member of the group works"
        return None

    def finish(self) -> None:
        self.careless[0].count_losses()


def new_topic(topic: TopicShape) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        configs=(("min.insync.replicas", str(topic.isr_min)), ("penstock.flush", topic.flush)),
    )


def offsets_topic() -> TopicShape:
    return TopicShape(OFFSETS_TOPIC, 1, 3, 2)
