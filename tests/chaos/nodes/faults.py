"""What can happen to a cluster: which nodes it hits, how it begins, and how it ends."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.brokers import ClusterProcesses
from tests.chaos.network import ProxyProcess, both_ways, clients, out_of, to
from tests.chaos.proxy import Path
from tests.chaos.view import Observer
from tests.chaos.workload import PARTITIONS, STRONG, pick

KILL, FREEZE, CUT, POWER, OUTAGE = "kill", "freeze", "cut", "power", "outage"
LEADER, FOLLOWER, CONTROLLER, PAIR, ALL = "leader", "follower", "controller", "leader and follower", "all"

VICTIMS = {
    KILL: {LEADER: 65, CONTROLLER: 15, PAIR: 12, ALL: 8},
    FREEZE: {LEADER: 55, CONTROLLER: 20, FOLLOWER: 10, PAIR: 15},
    POWER: {LEADER: 40, PAIR: 30, ALL: 30},
    OUTAGE: {ALL: 1},
}
CUTS = {
    "isolated": 25,
    "isolated from clients too": 15,
    "out of it": 15,
    "into it": 15,
    "between two": 12,
    "one way between two": 13,
    "connections reset": 5,
    "slow": 10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A fault that has begun. `lasting_s` is None where it lasts until someone starts the node again."""

    kind: str
    shape: str
    targets: tuple[int, ...]
    lasting_s: float | None
    end: Callable[[], None]

    @property
    def words(self) -> str:
        return f"{self.kind} ({self.shape}) of {', '.join(map(str, self.targets))}"


class Hands:
    """Nodes are stopped and started by one hand at a time."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._locks = {node_id: threading.Lock() for node_id in ids}

    @contextlib.contextmanager
    def on(self, ids: Sequence[int]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for node_id in sorted(ids):
                held.enter_context(self._locks[node_id])
            yield


class Faults:
    def __init__(
        self, cluster: ClusterProcesses, proxy: ProxyProcess, observer: Observer, chance: random.Random
    ) -> None:
        self._cluster = cluster
        self._proxy = proxy
        self._observer = observer
        self._chance = chance
        self.bytes_lost = 0

    def choose(self, kind: str) -> tuple[str, tuple[int, ...]]:
        """A shape, and the nodes that it hits, the first of them a leader if there is one."""
        if len(self._cluster.nodes) == 1:
            return LEADER, (1,)
        if kind == CUT:
            return pick(self._chance, CUTS), self._named(PAIR)
        shape = pick(self._chance, VICTIMS[kind])
        return shape, self._named(shape)

    def _named(self, shape: str) -> tuple[int, ...]:
        ids = list(self._cluster.nodes)
        if shape == ALL:
            return tuple(ids)
        leader = self._observer.leader_of(STRONG, self._chance.randrange(PARTITIONS[STRONG]))
        leader = leader if leader in ids else self._chance.choice(ids)
        others = [node_id for node_id in ids if node_id != leader]
        self._chance.shuffle(others)
        if shape == CONTROLLER:
            controller = self._observer.controller()
            return (controller if controller in ids else leader,)
        return {LEADER: (leader,), FOLLOWER: (others[0],), PAIR: (leader, others[0])}[shape]

    def fire(self, kind: str, shape: str, targets: tuple[int, ...]) -> Hit:
        match kind:
            case "kill":
                return self._kill(shape, targets)
            case "freeze":
                return self._freeze(shape, targets)
            case "power":
                return self._lose_power(shape, targets)
            case "outage":
                hit = self._kill(shape, targets)
                return Hit(kind=OUTAGE, shape=shape, targets=targets, lasting_s=0.0, end=hit.end)
            case "cut":
                return self._cut(shape, targets)
        raise AssertionError(f"no such fault: {kind}")

    def _kill(self, shape: str, targets: tuple[int, ...]) -> Hit:
        for node_id in targets:
            self._cluster.nodes[node_id].kill()
        return Hit(kind=KILL, shape=shape, targets=targets, lasting_s=None, end=self._launching(targets))

    def _lose_power(self, shape: str, targets: tuple[int, ...]) -> Hit:
        hit = self._kill(shape, targets)
        for node_id in targets:
            self.bytes_lost += self._cluster.nodes[node_id].lose_power(self._chance)
        return Hit(kind=POWER, shape=shape, targets=targets, lasting_s=None, end=hit.end)

    def _launching(self, targets: tuple[int, ...]) -> Callable[[], None]:
        return lambda: self._cluster.launch(targets)

    def _freeze(self, shape: str, targets: tuple[int, ...]) -> Hit:
        nodes = [self._cluster.nodes[node_id] for node_id in targets]
        for node in nodes:
            node.freeze()

        def thaw() -> None:
            for node in nodes:
                node.thaw()

        return Hit(kind=FREEZE, shape=shape, targets=targets, lasting_s=self._while_s(), end=thaw)

    def _cut(self, shape: str, targets: tuple[int, ...]) -> Hit:
        paths = self._paths(shape, targets)
        if shape == "connections reset":
            self._proxy.refuse(paths)
        elif shape == "slow":
            self._proxy.delay(paths, self._chance.uniform(0.05, 0.6))
        else:
            self._proxy.cut(paths)
        reset = self._chance.random() < 0.5

        def heal() -> None:
            self._proxy.heal(reset=reset)

        return Hit(kind=CUT, shape=shape, targets=targets[:1], lasting_s=self._while_s(), end=heal)

    def _paths(self, shape: str, targets: tuple[int, ...]) -> list[Path]:
        one = targets[0]
        others = [node_id for node_id in self._cluster.nodes if node_id != one]
        match shape:
            case "isolated from clients too":
                return both_ways(one, [*others, clients()])
            case "out of it":
                return out_of(one, others)
            case "into it":
                return to(one, others)
            case "between two":
                return both_ways(one, targets[1:])
            case "one way between two":
                return self._chance.choice([out_of, to])(one, targets[1:])
        return both_ways(one, others) or both_ways(one, [clients()])

    def _while_s(self) -> float:
        """Some failures pass before anyone notices, most do not."""
        return (
            self._chance.uniform(0.2, 0.8) if self._chance.random() < 0.2 else self._chance.uniform(1.5, 3.0)
        )
