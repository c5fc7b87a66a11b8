"""A world of a consumer group by the server-side protocol, whose members come, go, crash, sleep and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from simulation.clients import Sleeper
from simulation.cluster import Cluster, Shape
from simulation.consumers import TOPIC, ConsumerMember
from simulation.ownership import Ownership
from simulation.timings import SMALL
from simulation.workload import TopicShape, Workload, offsets_topic
from simulation.world import World

_MEMBERS_MAX: Final = 4
_INSTANCES: Final = ("i0", "i1")


def build(world: World) -> tuple[Cluster, Workload]:
    extra = 1 if world.chance(0.4) else 0
    cluster = Cluster(world, Shape(brokers=extra, clock_drift=0.03), SMALL)
    return cluster, ConsumerWorkload(cluster, (TopicShape(TOPIC, world.between(2, 5), 3, 2), offsets_topic()))


class ConsumerWorkload(Workload):
    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...]) -> None:
        super().__init__(cluster, topics)
        self.ownership = Ownership(cluster)
        self._joined = 0

    def begin(self) -> None:
        for _ in range(2):
            self._join()

    def _join(self) -> None:
        """Dynamic, or static under a name that nobody living uses."""
        taken = {member.instance for member in self._alive()}
        free = [name for name in _INSTANCES if name not in taken]
        instance = free[0] if free and self.world.chance(0.5) else None
        id = -2 - self._joined % 25
        self._joined += 1
        member = ConsumerMember(self.cluster, id, self.counts, self.ownership, instance)
        member.begin()

    def _alive(self) -> list[ConsumerMember]:
        return [member for member in self.ownership.members if not member.is_over and not member.is_leaving]

    @property
    def has_begun(self) -> bool:
        return self.counts["offsets committed"] >= 3 and len(self._covered()) == self._partitions

    @property
    def _partitions(self) -> int:
        return len(self.cluster.partitions(TOPIC))

    def _covered(self) -> set[int]:
        return {partition for member in self._alive() for partition in member.owned}

    @property
    def sleepers(self) -> Sequence[Sleeper]:
        return self._alive()

    def step(self) -> None:
        world, alive = self.world, self._alive()
        kind = world.draw(100)
        if self.is_closing:
            if not alive:
                self._join()
        elif kind < 6 and len(alive) < _MEMBERS_MAX:
            self._join()
        elif kind < 10 and len(alive) > 1:
            alive[world.draw(len(alive))].is_leaving = True
        elif kind < 12 and len(alive) > 1:
            world.note("member crashes")
            alive[world.draw(len(alive))].crash()

    def finish(self) -> None:
        """All of it has been judged on the way."""

    def unfinished(self) -> str | None:
        alive = self._alive()
        group = self.ownership.group
        for key in self.cluster.partitions(CONSUMER_OFFSETS):
            self.ownership.look(key)
        if group is None or not alive:
            return "there is no group"
        if sorted(group.members) != sorted(member.member_id for member in alive):
            return f"the group has {sorted(group.members)}, of whom {alive} are alive"
        owned = sorted(partition for member in alive for partition in member.owned)
        if owned != list(range(self._partitions)):
            return f"{alive} own {owned} of {self._partitions} partitions"
        return self.unavailable()
