"""A world of transactions: writers and copiers under all faults, with requests that arrive when nobody expects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.cluster.topic_names import TRANSACTION_STATE
from simulation.admission import with_transactions
from simulation.clients import Producer, Sleeper
from simulation.cluster import Cluster, Shape
from simulation.replica import Key
from simulation.timings import SMALL
from simulation.transaction_history import TransactionHistory
from simulation.transactors import CommittedReader, Copier, Transactor, Writer
from simulation.workload import TopicShape, Workload, internal_topic, offsets_topic
from simulation.world import World

_COMMITTED_MIN: Final = 6
#: Of the records that clients send: they come when the client has given them up.
_HOLD_CHANCE: Final = 0.04


def build(world: World) -> tuple[Cluster, Workload]:
    extra = 1 if world.chance(0.4) else 0
    cluster = Cluster(world, Shape(brokers=extra, clock_drift=0.03), SMALL)
    cluster.transaction_version = 2 if world.chance(0.75) else 1
    cluster.on_start.append(with_transactions)
    topics = (
        TopicShape("input", 1 + world.draw(2), 3, 2),
        TopicShape("copies", 2, 3, 2),
        TopicShape("ledger", 2, 3, 2),
        offsets_topic(),
        internal_topic(TRANSACTION_STATE),
    )
    return cluster, TransactionWorkload(cluster, topics)


class TransactionWorkload(Workload):
    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...]) -> None:
        super().__init__(cluster, topics)
        self.history = TransactionHistory()
        self.producer = Producer(cluster, -1, self.counts)
        self.reader = CommittedReader(cluster, -20, self.counts, self.history)
        #: Every incarnation, the last of each name being the one that counts.
        self.transactors: list[Transactor] = []
        self._current: dict[str, Transactor] = {}
        # With the older protocol nobody can tell what is late from what is meant now.
        cluster.network.weather.hold_chance = _HOLD_CHANCE if cluster.transaction_version >= 2 else 0.0

    def begin(self) -> None:
        self.reader.begin([*self._keys("copies"), *self._keys("ledger")])
        for number in range(2):
            self._incarnate(f"writer{number}")
        for key in self._keys("input"):
            self._incarnate(f"copier{key.partition}")

    def _keys(self, topic: str) -> list[Key]:
        return self.cluster.partitions(topic)

    def _incarnate(self, name: str) -> None:
        """A new incarnation takes the name over; the one before may not know it yet."""
        before = self._current.get(name)
        fields: dict[str, Any] = {"name": name, "version": self.cluster.transaction_version}
        id = -2 - len(self.transactors) % 17
        place = (self.cluster, id, self.counts, self.history)
        number = int(name[-1])
        if name.startswith("writer"):
            made = self._writer(before, Writer(*place, is_two_phase=number == 1, **fields))
        else:
            made = Copier(*place, source=self._keys("input")[number], **fields)
        self.transactors.append(made)
        self._current[name] = made
        made.begin(lambda: self._ended(made))

    def _writer(self, before: Transactor | None, writer: Writer) -> Transactor:
        writer.is_closing = self.is_closing
        writer.inherited = before.transaction if before is not None and before.is_prepared else 0
        return writer

    def _ended(self, made: Transactor) -> None:
        """Fenced, or it left a prepared transaction: somebody goes on, unless somebody has already."""
        if self._current.get(made.name) is made and not (self.is_closing and self._may_rest(made)):
            self.admin.after(self.world.between(1, 150), self._go_on, made)

    def _go_on(self, made: Transactor) -> None:
        if self._current.get(made.name) is made:
            self._incarnate(made.name)

    def _may_rest(self, made: Transactor) -> bool:
        """What a two-phase writer leaves open, time does not close."""
        is_left = made.is_prepared or (made.is_two_phase and made.was_fenced)
        return isinstance(made, Writer) and not is_left

    @property
    def has_begun(self) -> bool:
        return self.counts["transactions committed"] >= _COMMITTED_MIN and self.counts["records copied"] > 0

    @property
    def sleepers(self) -> Sequence[Sleeper]:
        return [made for made in self.transactors if not made.is_over]

    def step(self) -> None:
        world = self.world
        kind = world.draw(20)
        if self.is_closing:
            return
        if kind < 3:
            self.producer.send(self.partition_of("input"), world.between(1, 2))
        elif kind == 6 and world.chance(0.6):
            # Somebody believes that it hangs, or is gone, and starts another; two-phase ones hand over only at rest.
            names = [name for name, made in self._current.items() if not made.is_two_phase]
            self.counts["incarnations replaced"] += 1
            self._incarnate(names[world.draw(len(names))])

    def close(self) -> None:
        super().close()
        self.cluster.network.weather.hold_chance = 0.0
        for made in self.transactors:
            if isinstance(made, Writer):
                made.is_closing = True

    def unfinished(self) -> str | None:
        if self.producer.has_unacknowledged:
            return "records of an idempotent producer are not acknowledged"
        for made in self._current.values():
            if isinstance(made, Writer) and not (made.is_over and self._may_rest(made)):
                return f"{made} has not come to its end"
        for topic in self.topics:
            for key in self._keys(topic.name):
                if (reason := self._unstable(topic.name, key)) is not None:
                    return reason
        copied, inputs = self._copied()
        if copied != inputs:
            return f"{copied} of {inputs} inputs are copied"
        return self.unavailable()

    def _unstable(self, topic: str, key: Key) -> str | None:
        """Nothing hangs: the last stable offset of every leader moves to the end."""
        leader = self.cluster.invariants.image.topics_by_id[key.topic_id].partitions[key.partition].leader
        node = None if leader not in self.cluster.machines else self.cluster.machines[leader].node
        replica = None if node is None else node.replicas.get(key)
        if replica is None or replica.leading is None:
            return f"{topic} {key} is not led"
        if replica.log.last_stable_offset < replica.log.end_offset:
            return f"a transaction hangs in {topic} {key} at {replica.log.last_stable_offset}"
        if key in self.reader.positions and not self.reader.has_read(key):
            return f"{topic} {key} was not read to its end"
        return None

    def _copied(self) -> tuple[int, int]:
        inputs = sum(self.cluster.invariants.ledger(key).end_offset for key in self._keys("input"))
        return self.history.copies_seen, inputs

    def finish(self) -> None:
        ends = {key: self.cluster.invariants.ledger(key).end_offset for key in self._keys("input")}
        self.history.finish(ends)
