"""A world with a schedule: records that are held until they are due, through all faults none early, twice or lost."""

from __future__ import annotations

from collections import Counter
from typing import Final

from penstock.cluster.topic_names import SCHEDULE
from penstock.protocol.errors import ErrorCode
from simulation.clients import Client
from simulation.clock import WALL_START_MS
from simulation.cluster import Cluster, Shape
from simulation.ledger import Violation
from simulation.moving import SCHEDULED_TOPIC, Later, with_schedule
from simulation.releasing import Released
from simulation.replica import Key, Produce
from simulation.script import Ask, Steps, play
from simulation.timings import SMALL
from simulation.workload import TopicShape, Workload, internal_topic
from simulation.world import World

_PRODUCERS: Final = 2
#: How long records are held: none, less than a fail-over, more than one.
_DELAYS_MS: Final = ((0, 30), (20, 300), (200, 1_200))


def build(world: World) -> tuple[Cluster, Workload]:
    extra = 1 if world.chance(0.4) else 0
    # Clocks that agree unless somebody sets one: so an outsider can tell what is early.
    cluster = Cluster(world, Shape(brokers=extra), SMALL)
    cluster.on_start.append(with_schedule)
    topics = (TopicShape(SCHEDULED_TOPIC, 1 + world.draw(2), 3, 2), internal_topic(SCHEDULE))
    return cluster, ScheduleWorkload(cluster, topics)


class ScheduleHistory:
    """What producers asked for, and when it came."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.due_ms: dict[bytes, int] = {}
        self.acknowledged: dict[bytes, None] = {}
        self.released: dict[bytes, None] = {}
        self._seen: dict[Key, int] = {}
        #: How far ahead of all others a clock has ever been.
        self._ahead_ms = 0

    def look(self) -> None:
        now_ms = WALL_START_MS + self.cluster.world.now_ms
        for machine in self.cluster.machines.values():
            self._ahead_ms = max(self._ahead_ms, machine.clock.wall_ms() - now_ms)
        for key in self.cluster.partitions(SCHEDULED_TOPIC):
            batches = self.cluster.invariants.ledger(key).batches
            for batch in batches[self._seen.get(key, 0) :]:
                for value in batch.payload:
                    if isinstance(value, Released):
                        self._released(value, now_ms)
            self._seen[key] = len(batches)

    def _released(self, value: Released, now_ms: int) -> None:
        if value.name in self.released:
            raise Violation("no scheduled record comes twice", f"{value}")
        if self.due_ms[value.name] > now_ms + self._ahead_ms:
            raise Violation("no scheduled record comes early", f"{value} at {now_ms}")
        self.released[value.name] = None

    def missing(self) -> list[bytes]:
        return [name for name in self.acknowledged if name not in self.released]


class Scheduler(Client):
    """An idempotent producer, one batch at a time to each partition, some of whose records are for later."""

    def __init__(self, cluster: Cluster, id: int, counts: Counter[str], history: ScheduleHistory) -> None:
        super().__init__(cluster, id, counts)
        self.history = history
        self.is_closing = False
        self.is_done = False
        self._sequences: dict[Key, int] = {}

    def begin(self) -> None:
        play(self, self._live(), self._ended)

    def _ended(self, _: object) -> None:
        self.is_done = True

    def _live(self) -> Steps:
        while not self.is_closing:
            keys = self.cluster.partitions(SCHEDULED_TOPIC)
            yield from self._send(keys[self.world.draw(len(keys))])
            yield self.world.between(5, 60)

    def _send(self, key: Key) -> Steps:
        values = tuple(self._record() for _ in range(self.world.between(1, 4)))
        sequence = self._sequences.get(key, 0)
        self._sequences[key] = sequence + len(values)
        request = Produce(key, values, True, -self.id, 0, sequence)
        while True:
            reply = yield Ask(key, "schedule", request)
            if reply is not None and reply[0] is ErrorCode.none:
                break
            yield self.world.between(self.backoff_ms // 2, 2 * self.backoff_ms)
        held = [value.name for value in values if isinstance(value, Later)]
        self.history.acknowledged |= dict.fromkeys(held)
        self.counts["records acknowledged"] += len(values)
        self.counts["records held"] += len(held)

    def _record(self) -> Later | str:
        if self.world.chance(0.3):
            return "now"
        name = b"r%d" % self.world.serial()
        delay_ms = self.world.between(*_DELAYS_MS[self.world.draw(len(_DELAYS_MS))])
        self.history.due_ms[name] = WALL_START_MS + self.world.now_ms + delay_ms
        return Later(name, self.history.due_ms[name])


class ScheduleWorkload(Workload):
    #: A clock that was ahead of all others has to be waited for: what came while it was comes after what it released.
    mend_ms_max = 60_000

    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...]) -> None:
        super().__init__(cluster, topics)
        self.history = ScheduleHistory(cluster)
        self.producers = [Scheduler(cluster, -1 - n, self.counts, self.history) for n in range(_PRODUCERS)]

    def begin(self) -> None:
        for producer in self.producers:
            producer.begin()

    @property
    def has_begun(self) -> bool:
        return len(self.history.released) >= 5

    def step(self) -> None:
        self.history.look()

    def close(self) -> None:
        super().close()
        for machine in self.cluster.machines.values():
            machine.clock.mend()
        for producer in self.producers:
            producer.is_closing = True

    def unfinished(self) -> str | None:
        if not all(producer.is_done for producer in self.producers):
            return "records are not acknowledged"
        missing = self.history.missing()
        if missing:
            return f"{len(missing)} records that were acknowledged have not come: {missing[:3]}"
        return self.unavailable()

    def finish(self) -> None:
        self.history.look()
        self.counts["records released"] += len(self.history.released)
