"""What goes on in a world besides faults: its topics, its operator, and clients that differ from world to world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.reassignment import Reassignment
from penstock.raft.types import Voter
from simulation.clients import Client, Sleeper
from simulation.cluster import Cluster
from simulation.coordinator import OFFSETS_TOPIC
from simulation.replica import Key

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


class Workload(ABC):
    """Worlds derive theirs from it."""

    #: How often it is asked whether everything is done.
    judged_every_ms = 15
    #: How long a world may take to work again.
    mend_ms_max = 8_000

    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...], *, pace_ms: int = 12) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.topics = topics
        self.pace_ms = pace_ms
        self.counts: Counter[str] = Counter()
        self.admin = Admin(cluster, -30, self.counts)
        self.is_closing = False
        #: A voter has lost its disk: who removes another now has to blame himself.
        self.keeps_voters = False
        self._judged_ms = 0

    # --- what a world says of its own ---

    @abstractmethod
    def begin(self) -> None:
        """The topics are there."""

    @abstractmethod
    def step(self) -> None:
        """One thing after the other, as chance has it."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Everybody is at work: faults hit a cluster that is used."""

    @property
    def sleepers(self) -> Sequence[Sleeper]:
        """Clients that may fall asleep."""
        return ()

    @abstractmethod
    def unfinished(self) -> str | None:
        """What still has to happen before this run has shown that the cluster works again."""

    @abstractmethod
    def finish(self) -> None:
        """What can be judged only at the end."""

    # --- beginning ---

    def start(self) -> None:
        wanted = [topic for topic in self.topics if topic.name not in self.cluster.invariants.image.topics]
        if not wanted:
            self.begin()
            self.admin.after(1, self._step)
            return
        active = self.cluster.active_controller()
        if active is not None and len(active.image.active_brokers()) >= len(self.cluster.brokers):
            self.admin.ask("create_topics", tuple(new_topic(topic) for topic in wanted))
        self.admin.after(30, self.start)

    def _step(self) -> None:
        self.step()
        self.admin.after(self.world.between(1, 2 * self.pace_ms), self._step)

    def partition_of(self, *names: str) -> Key:
        known = [topic for topic in self.topics if topic.name in names]
        topic = known[self.world.draw(len(known))] if known else self.topics[0]
        keys = self.cluster.partitions(topic.name)
        return keys[self.world.draw(len(keys))]

    def any_partition(self) -> Key:
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
        """Nothing new; what is under way is waited for."""
        self.is_closing = True

    def is_done(self) -> bool:
        if not self.is_closing or self.world.now_ms < self._judged_ms + self.judged_every_ms:
            return False
        self._judged_ms = self.world.now_ms
        return self.unfinished() is None

    def incomplete(self) -> str | None:
        """A partition whose replicas are not all in sync, or whose reassignment has not ended, if there is one."""
        for topic in self.cluster.invariants.image.topics.values():
            for index, state in topic.partitions.items():
                if state.adding_replicas or state.removing_replicas:
                    return f"{topic.name}-{index} is still being reassigned: {state}"
                if set(state.isr) != set(state.replicas):
                    return f"{topic.name}-{index} has in-sync set {state.isr} of {state.replicas}"
        return None

    def unavailable(self) -> str | None:
        """A partition that has not recovered, if there is one."""
        for topic in self.topics:
            for key in self.cluster.partitions(topic.name):
                state = self.cluster.invariants.image.topics_by_id[key.topic_id].partitions[key.partition]
                if not state.has_leader or len(state.isr) < min(topic.isr_min, len(state.replicas)):
                    return f"{topic.name} {key} has leader {state.leader} and in-sync set {state.isr}"
        return None


def new_topic(topic: TopicShape) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        configs=(("min.insync.replicas", str(topic.isr_min)), ("penstock.flush", topic.flush)),
    )


def offsets_topic() -> TopicShape:
    return internal_topic(OFFSETS_TOPIC)


def internal_topic(name: str) -> TopicShape:
    return TopicShape(name, 1, 3, 2)
