"""What the clients of a small world do: idempotent and careless producers, a consumer, and a classic group."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.clients import CarelessProducer, Consumer, Producer, Sleeper
from simulation.cluster import Cluster, Shape
from simulation.members import GroupHistory, Member
from simulation.replica import Key
from simulation.timings import SMALL
from simulation.workload import ACKNOWLEDGED_MIN, TopicShape, Workload, offsets_topic
from simulation.world import World


def build(world: World) -> tuple[Cluster, Workload]:
    extra = world.draw(3) if world.chance(0.5) else 0
    voters = 3 if world.chance(0.8) else 2
    cluster = Cluster(world, Shape(brokers=extra, voters=voters, clock_drift=0.03), SMALL)
    topics = [TopicShape("orders", 1 if world.chance(0.3) else 2, 3, 2), offsets_topic()]
    if world.chance(0.4):
        topics.append(TopicShape("plain", 1, world.between(2, 3), 1))
    if world.chance(0.3):
        topics.append(TopicShape("fast", 1, 3, 2, "never"))
    return cluster, SmallWorkload(cluster, tuple(topics))


class SmallWorkload(Workload):
    judged_every_ms = 0

    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...], *, pace_ms: int = 12) -> None:
        super().__init__(cluster, topics, pace_ms=pace_ms)
        self.producers = [Producer(cluster, -1 - number, self.counts) for number in range(2)]
        self.careless = [
            CarelessProducer(cluster, -10, self.counts, acks_all=False),
            CarelessProducer(cluster, -11, self.counts, acks_all=True),
        ]
        self.consumer = Consumer(cluster, -20, self.counts)
        self.history = GroupHistory(next(topic.partitions for topic in topics if topic.name == "orders"))
        self.members = [Member(cluster, -40 - number, self.counts, self.history) for number in range(2)]
        self._last_words: dict[tuple[int, Key], bool] = {}

    def begin(self) -> None:
        for member in self.members:
            member.after(self.world.between(1, 50), member.join)

    @property
    def has_begun(self) -> bool:
        """Everybody is at work: faults hit a cluster that is used."""
        if self.counts["records acknowledged"] < ACKNOWLEDGED_MIN // 2:
            return False
        return all(member.generation > 0 for member in self.members)

    @property
    def sleepers(self) -> Sequence[Sleeper]:
        return self.members

    # --- going on ---

    def step(self) -> None:
        """One thing after the other, as chance has it."""
        world = self.world
        kind = world.draw(20)
        if self.is_closing:
            self.consumer.poll(self.any_partition())
            self._say_last_words()
            if self.counts["records acknowledged"] < ACKNOWLEDGED_MIN:
                self.producers[1].send(self.partition_of("orders", "plain"), 2)
        elif kind < 8:
            producer = self.producers[world.draw(len(self.producers))]
            producer.send(self.partition_of("orders", "plain"), world.between(1, 3))
        elif kind < 9:
            self.careless[0].send(self.partition_of("orders", "plain"), 1)
        elif kind < 11:
            self.careless[1].send(self.partition_of("fast", "plain"), 1)
        elif kind < 14:
            self.consumer.poll(self.any_partition())
        elif kind < 16:
            self.consumer.ask_latest(self.any_partition())
        elif kind < 19:
            for member in self.members:
                member.commit()
        else:
            self.members[world.draw(len(self.members))].read(world.draw(self.history.partitions))

    # --- ending ---

    def close(self) -> None:
        """Nothing new but one last record for every partition; what is under way is waited for."""
        super().close()
        for topic in self.topics:
            if topic.name in ("orders", "plain"):
                for key in self.cluster.partitions(topic.name):
                    self._last_words[-1, key] = False

    def _say_last_words(self) -> None:
        for (id, key), is_said in self._last_words.items():
            if not is_said:
                self._last_words[id, key] = self.producers[0].send(key, 1)

    def unfinished(self) -> str | None:
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
        if not any(member.is_working for member in self.members):
            return "no member of the group works"
        return self.unavailable()

    def finish(self) -> None:
        self.careless[0].count_losses()
