"""A plan that spreads replicas and leaders evenly over brokers and racks, with as few moves as possible.

Replicas first leave brokers that are removed, then racks that hold two replicas of a partition, then brokers that hold
more than others. Leaders are spread last, by putting another replica first, which moves no data. The same
input gives the same plan.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

Replicas = tuple[int, ...]


class BrokerRack(NamedTuple):
    """A broker that may hold replicas. Brokers of one rack fail together."""

    id: int
    rack: str


class PartitionReplicas(NamedTuple):
    topic: str
    partition: int
    replicas: Replicas
    leader: int = -1
    size_bytes: int = 0


class PartitionMove(NamedTuple):
    """`moved_bytes` is 0 when only the preferred leader changes."""

    topic: str
    partition: int
    before: Replicas
    after: Replicas
    moved_bytes: int


class BrokerLoad(NamedTuple):
    broker_id: int
    rack: str
    replicas: int
    leaders: int
    size_bytes: int


class ReassignmentPlan(NamedTuple):
    """`before` counts the current leaders, `after` the leaders once each partition has its preferred one.

    Both include the brokers that are removed.
    """

    moves: tuple[PartitionMove, ...]
    before: tuple[BrokerLoad, ...]
    after: tuple[BrokerLoad, ...]

    @property
    def moved_bytes(self) -> int:
        return sum(move.moved_bytes for move in self.moves)


class ImpossiblePlan(Exception):
    """Fewer brokers would remain than a partition has replicas."""


def plan_reassignment(
    partitions: Sequence[PartitionReplicas],
    brokers: Sequence[BrokerRack],
    *,
    remove: Collection[int] = (),
    replication_factor: int | None = None,
) -> ReassignmentPlan:
    """`brokers` are all existing brokers, also new ones without replicas.

    Replicas on a broker in `remove`, or on one not in `brokers`, move elsewhere. `replication_factor` sets the number
    of replicas of every partition. Raises ImpossiblePlan.
    """
    staying = [broker for broker in sorted(brokers) if broker.id not in remove]
    largest = replication_factor or max((len(partition.replicas) for partition in partitions), default=0)
    if largest > len(staying):
        raise ImpossiblePlan(f"{largest} replicas need {largest} brokers, {len(staying)} would be left")
    builder = _PlanBuilder(sorted(partitions), staying)
    if replication_factor is not None:
        builder.shrink_to(replication_factor)
    builder.leave_brokers()
    if replication_factor is not None:
        builder.grow_to(replication_factor)
    builder.leave_racks()
    builder.level()
    builder.spread_leaders()
    now = [partition.replicas for partition in builder.partitions]
    leaders = [partition.leader for partition in builder.partitions]
    wanted = [tuple(replicas) for replicas in builder.replicas]
    return ReassignmentPlan(
        tuple(_moves(builder.partitions, wanted)),
        _loads(builder.partitions, brokers, now, leaders),
        _loads(builder.partitions, brokers, wanted, [replicas[0] for replicas in wanted]),
    )


class _PlanBuilder:
    """The plan while it is built: partitions by number, each with its replicas in order."""

    def __init__(self, partitions: list[PartitionReplicas], brokers: list[BrokerRack]) -> None:
        self.partitions = partitions
        self.replicas = [list(partition.replicas) for partition in partitions]
        self._rack = {broker.id: broker.rack for broker in brokers}
        self._held: dict[int, set[int]] = {broker.id: set() for broker in brokers}
        self._bytes: Counter[int] = Counter()
        for number, replicas in enumerate(self.replicas):
            for broker in replicas:
                self._take(number, broker)

    # --- a different number of replicas ---

    def shrink_to(self, replication_factor: int) -> None:
        for number, replicas in enumerate(self.replicas):
            while len(replicas) > replication_factor:
                self._drop(number, max(replicas, key=lambda broker: self._removal_rank(number, broker)))

    def grow_to(self, replication_factor: int) -> None:
        for number, replicas in enumerate(self.replicas):
            while len(replicas) < replication_factor:
                replicas.append(newcomer := self._best_for(number))
                self._take(number, newcomer)

    def _removal_rank(self, number: int, broker: int) -> tuple[bool, bool, int, tuple[int, int, int]]:
        """Ranks replicas on removed brokers highest, then any but the leader, then those that share a rack."""
        crowd = self._racks_of(number)[self._rack.get(broker, "")]
        return broker not in self._rack, broker != self.partitions[number].leader, crowd, self._load(broker)

    # --- the three reasons to move a replica ---

    def leave_brokers(self) -> None:
        """Moves large partitions first, while there is the most room."""
        order = sorted(range(len(self.partitions)), key=lambda n: -self.partitions[n].size_bytes)
        for number in order:
            for broker in [b for b in self.replicas[number] if b not in self._rack]:
                self._move(number, broker, self._best_for(number))

    def leave_racks(self) -> None:
        for number in range(len(self.partitions)):
            while (move := self._rack_move(number)) is not None:
                self._move(number, *move)

    def level(self) -> None:
        while (move := self._levelling_move()) is not None:
            self._move(*move)

    def _best_for(self, number: int) -> int:
        racks = self._racks_of(number)
        free = [broker for broker in self._rack if broker not in self.replicas[number]]
        return min(free, key=lambda broker: (racks[self._rack[broker]], *self._load(broker)))

    def _rack_move(self, number: int) -> tuple[int, int] | None:
        """Moves from a rack with at least two more replicas of the partition than the target's rack."""
        racks = self._racks_of(number)
        target = self._best_for(number) if len(self.replicas[number]) < len(self._rack) else None
        if target is None:
            return None
        crowded = [b for b in self.replicas[number] if racks[self._rack[b]] - racks[self._rack[target]] >= 2]
        return (max(crowded, key=self._load), target) if crowded else None

    def _levelling_move(self) -> tuple[int, int, int] | None:
        by_load = sorted(self._rack, key=self._load)
        for source in reversed(by_load):
            for target in by_load:
                if len(self._held[source]) - len(self._held[target]) < 2:
                    break
                movable = [n for n in self._held[source] if self._may_move(n, source, target)]
                if movable:
                    return min(movable, key=lambda n: self._cost(n, source, target)), source, target
        return None

    def _may_move(self, number: int, source: int, target: int) -> bool:
        if target in self.replicas[number]:
            return False
        racks = self._racks_of(number)
        left, entered = self._rack[source], self._rack[target]
        return left == entered or racks[entered] < racks[left]

    def _cost(self, number: int, source: int, target: int) -> tuple[bool, bool, int, int]:
        """Prefers a replica that moves anyway or returns to its old broker, then the closest sizes of both brokers."""
        original = self.partitions[number].replicas
        gap = self._bytes[source] - self._bytes[target] - 2 * self.partitions[number].size_bytes
        return source in original, target not in original, abs(gap), number

    # --- leaders ---

    def spread_leaders(self) -> None:
        while (path := self._path_to_fewer_leaders()) is not None:
            for number, broker in path:
                replicas = self.replicas[number]
                replicas.remove(broker)
                replicas.insert(0, broker)

    def _path_to_fewer_leaders(self) -> list[tuple[int, int]] | None:
        """From a broker that leads the most to one that leads at least two fewer; each step passes on one partition."""
        led: dict[int, list[int]] = {broker: [] for broker in self._rack}
        for number, replicas in enumerate(self.replicas):
            led[replicas[0]].append(number)
        for start in sorted(led, key=lambda broker: (-len(led[broker]), broker)):
            path = self._path_from(start, led)
            if path is not None:
                return path
        return None

    def _path_from(self, start: int, led: dict[int, list[int]]) -> list[tuple[int, int]] | None:
        paths: dict[int, list[tuple[int, int]]] = {start: []}
        waiting = deque([start])
        while waiting:
            broker = waiting.popleft()
            if len(led[start]) - len(led[broker]) >= 2:
                return paths[broker]
            for number in led[broker]:
                for other in self.replicas[number][1:]:
                    if other not in paths:
                        paths[other] = [*paths[broker], (number, other)]
                        waiting.append(other)
        return None

    # --- bookkeeping ---

    def _load(self, broker: int) -> tuple[int, int, int]:
        return len(self._held[broker]), self._bytes[broker], broker

    def _racks_of(self, number: int) -> Counter[str]:
        return Counter(self._rack[broker] for broker in self.replicas[number] if broker in self._rack)

    def _take(self, number: int, broker: int) -> None:
        self._held.setdefault(broker, set()).add(number)
        self._bytes[broker] += self.partitions[number].size_bytes

    def _move(self, number: int, source: int, target: int) -> None:
        replicas = self.replicas[number]
        replicas[replicas.index(source)] = target
        self._leave(number, source)
        self._take(number, target)

    def _drop(self, number: int, broker: int) -> None:
        self.replicas[number].remove(broker)
        self._leave(number, broker)

    def _leave(self, number: int, broker: int) -> None:
        self._held[broker].discard(number)
        self._bytes[broker] -= self.partitions[number].size_bytes


def _moves(partitions: Sequence[PartitionReplicas], wanted: Sequence[Replicas]) -> Iterator[PartitionMove]:
    for partition, after in zip(partitions, wanted, strict=True):
        if after != partition.replicas:
            newcomers = len(set(after) - set(partition.replicas))
            yield PartitionMove(
                partition.topic,
                partition.partition,
                partition.replicas,
                after,
                newcomers * partition.size_bytes,
            )


def _loads(
    partitions: Sequence[PartitionReplicas],
    brokers: Sequence[BrokerRack],
    replicas: Sequence[Replicas],
    leaders: Sequence[int],
) -> tuple[BrokerLoad, ...]:
    racks = {broker.id: broker.rack for broker in brokers}
    for partition in partitions:
        for gone in partition.replicas:
            racks.setdefault(gone, "")
    counts = Counter(broker for each in replicas for broker in each)
    leads = Counter(leaders)
    sizes: Counter[int] = Counter()
    for partition, each in zip(partitions, replicas, strict=True):
        for broker in each:
            sizes[broker] += partition.size_bytes
    return tuple(
        BrokerLoad(broker, rack, counts[broker], leads[broker], sizes[broker])
        for broker, rack in sorted(racks.items())
    )
