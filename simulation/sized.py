"""The sized cluster of the requirements: 90 brokers in 9 racks, 200 partitions x 3. How long is a partition away?

Timings are the product's defaults. A partition is away from the moment its leader's machine loses power until a
record sent to the new leader is acknowledged; nobody closes connections, so nothing is learnt before a timeout.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from simulation.clients import Client
from simulation.cluster import Cluster, Shape
from simulation.ledger import Violation
from simulation.node import Machine
from simulation.replica import Key, Produce
from simulation.timings import DEFAULT, WorldTimings
from simulation.workload import TopicShape, new_topic
from simulation.world import World

_PARTITIONS: Final = 200
_TOPIC: Final = TopicShape("orders", _PARTITIONS, 3, 2)
_PROBE_MS: Final = 100
_PATIENCE_MS: Final = 60_000


class FailOver(NamedTuple):
    """Simulated milliseconds without acknowledgements, over the partitions that lost their leader."""

    what: str
    brokers: int
    partitions: int
    median_ms: int
    max_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedReport:
    brokers: int
    controllers: int
    racks: int
    partitions: int
    session_ms: int
    events: int
    acknowledged: int
    fail_overs: tuple[FailOver, ...]

    def as_json(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "fail_overs"}
        return json.dumps(values | {"fail_overs": [each._asdict() for each in self.fail_overs]})

    def lines(self) -> list[str]:
        size = f"{self.brokers} brokers in {self.racks} racks, {self.partitions} partitions x 3"
        return [f"{size}, session timeout {self.session_ms} ms, {self.events} events"] + [
            f"{each.what}: {each.partitions} leaders on {each.brokers} broker(s) lost, "
            f"fail-over median {each.median_ms} ms, longest {each.max_ms} ms (simulated)"
            for each in self.fail_overs
        ]


class Prober(Client):
    """Sends one record after the other to a partition, and notes when the first is acknowledged again."""

    def __init__(self, cluster: Cluster, counts: Counter[str]) -> None:
        super().__init__(cluster, -1, counts)
        self.since: dict[Key, int] = {}
        self.away_ms: dict[Key, int] = {}

    def watch(self, keys: list[Key]) -> None:
        self.since = dict.fromkeys(keys, self.world.now_ms)
        self.away_ms = {}
        for key in keys:
            self._probe(key)

    @property
    def is_done(self) -> bool:
        return len(self.away_ms) == len(self.since)

    def _probe(self, key: Key) -> None:
        leader = self.cluster.leader_hint(key)
        if leader < 0:
            self.after(_PROBE_MS, self._probe, key)
            return
        request = Produce(key, ((self.id, self.world.serial()),), True)
        self.call(leader, "produce", request, lambda reply, _: self._answered(key, request.values, reply))

    def _answered(self, key: Key, values: tuple[Any, ...], reply: Any) -> None:
        if reply is not None and reply[0] is ErrorCode.none:
            self.invariants.acknowledged(key, reply[1], values)
            self.counts["acknowledged"] += 1
            self.away_ms.setdefault(key, self.world.now_ms - self.since[key])
        else:
            self.after(_PROBE_MS, self._probe, key)


class SizedWorld:
    def __init__(
        self, seed: int, *, brokers: int, controllers: int, racks: int, timings: WorldTimings
    ) -> None:
        self.world = World(seed)
        shape = Shape(
            controllers=controllers, voters=controllers, brokers=brokers, dedicated=True, racks=racks
        )
        self.cluster = Cluster(self.world, shape, timings)
        self.cluster.served_batches_max = 50
        self.counts: Counter[str] = Counter()
        self.prober = Prober(self.cluster, self.counts)

    def start(self) -> None:
        for machine in self.cluster.machines.values():
            self.cluster.start(machine)
        self._until(self._is_ready, "the brokers do not register")
        self._create()
        self._until(self._is_led, "the partitions have no leaders")
        self._measure(self.cluster.partitions(_TOPIC.name))

    def fail(self, what: str, machines: list[Machine]) -> FailOver:
        """These lose power at once; afterwards they come back, and all is in sync again."""
        ids = {machine.id for machine in machines}
        led = [key for key in self.cluster.partitions(_TOPIC.name) if self._state(key).leader in ids]
        for machine in machines:
            self.cluster.lose_power(machine)
        away_ms = self._measure(led)
        for machine in machines:
            self.cluster.start(machine)
        self._until(self._is_in_sync, f"not in sync after {what}")
        return FailOver(what, len(ids), len(led), int(median(away_ms)), max(away_ms))

    def _measure(self, keys: list[Key]) -> list[int]:
        self.prober.watch(keys)
        self._until(lambda: self.prober.is_done, "partitions acknowledge nothing")
        return list(self.prober.away_ms.values())

    def _create(self) -> None:
        active = self.cluster.active_controller()
        assert active is not None
        self.prober.call(active.id, "create_topics", (new_topic(_TOPIC),), lambda reply, refused: None)

    def _is_ready(self) -> bool:
        active = self.cluster.active_controller()
        return active is not None and len(active.image.active_brokers()) == len(self.cluster.brokers)

    def _is_led(self) -> bool:
        keys = self.cluster.partitions(_TOPIC.name)
        return len(keys) == _PARTITIONS and all(self._state(key).has_leader for key in keys)

    def _is_in_sync(self) -> bool:
        return all(len(self._state(key).isr) == 3 for key in self.cluster.partitions(_TOPIC.name))

    def _state(self, key: Key) -> Any:
        return self.cluster.invariants.image.topics_by_id[key.topic_id].partitions[key.partition]

    def _until(self, is_done: Any, otherwise: str) -> None:
        """Looked at ten times a second: the conditions are not cheap."""
        ends_ms = self.world.now_ms + _PATIENCE_MS
        while not is_done():
            if self.world.now_ms >= ends_ms:
                raise Violation("progress", otherwise)
            self.world.run(self.world.now_ms + 100)


def run_sized(
    seed: int,
    *,
    brokers: int = 90,
    controllers: int = 3,
    racks: int = 9,
    timings: WorldTimings = DEFAULT,
) -> SizedReport:
    """A broker, three brokers of different racks, and a whole rack fail, one after the other."""
    sized = SizedWorld(seed, brokers=brokers, controllers=controllers, racks=racks, timings=timings)
    sized.start()
    machines = {id: sized.cluster.machines[id] for id in sized.cluster.brokers}
    rack = [machine for machine in machines.values() if machine.rack == "rack1"]
    one, another = controllers + 2, controllers + 2 + racks // 2
    fail_overs = (
        sized.fail("one broker", [machines[one]]),
        sized.fail("another broker", [machines[another]]),
        sized.fail("one rack", rack),
    )
    return SizedReport(
        brokers=brokers,
        controllers=controllers,
        racks=racks,
        partitions=_PARTITIONS,
        session_ms=timings.session_ms,
        events=sized.world.events,
        acknowledged=sized.counts["acknowledged"],
        fail_overs=fail_overs,
    )
