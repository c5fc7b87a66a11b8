"""Rolling restarts and reassignments during a campaign, as operators do them."""

import random
import threading
from collections import Counter
from collections.abc import Callable

from tests.brokers import ClusterProcesses
from tests.chaos.nodes.faults import Hands
from tests.chaos.view import Observer
from tests.chaos.workload import PARTITIONS, STRONG
from tests.waiting import eventually

ROLLING, REASSIGN, CERTIFICATES = "rolling restart", "reassignment", "new certificates"
STEP_S = 30.0


class Upkeep:
    """A thread with a list of chores; each begins when the campaign has come far enough."""

    def __init__(
        self,
        cluster: ClusterProcesses,
        observer: Observer,
        hands: Hands,
        chance: random.Random,
        chores: list[str],
        replace_certificates: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._hands = hands
        self._chance = chance
        self._chores = chores
        self._replace_certificates = replace_certificates
        self._share_done = 0.0
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self.done: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def reached(self, share: float) -> None:
        """The campaign has done this share of its faults."""
        with self._changed:
            self._share_done = share
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(4 * STEP_S)
        if self.failure is not None:
            raise AssertionError("upkeep has failed") from self.failure

    def _run(self) -> None:
        try:
            for number, chore in enumerate(self._chores):
                if not self._turn_of(number):
                    return
                self._do(chore)
        except BaseException as error:
            self.failure = error

    def _turn_of(self, number: int) -> bool:
        due = number / len(self._chores)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._share_done >= due)
            return not self._is_over

    def _do(self, chore: str) -> None:
        if chore == ROLLING:
            self._roll()
        elif chore == CERTIFICATES:
            self._replace_certificates()
        else:
            self._move()
        self.done[chore] += 1

    def _roll(self) -> None:
        for node in self._cluster.nodes.values():
            self._try(lambda node=node: node.is_ready, "nodes that were not ready to be restarted")  # type: ignore[misc]
            with self._hands.on([node.node_id]):
                if not node.is_ready:
                    continue
                if (code := node.stop()) != 0:
                    self.notes[f"node {node.node_id} ended with {code} when told to stop"] += 1
                node.launch()
            self._try(lambda node=node: node.is_ready, "restarted nodes that were not ready in time")  # type: ignore[misc]

    def _move(self) -> None:
        """Away from one node, and back to all: what comes back has to be fetched from the start."""
        partition = self._chance.randrange(PARTITIONS[STRONG])
        ids = self._chance.sample(list(self._cluster.nodes), len(self._cluster.nodes))
        self._ask(partition, ids[:2])
        if self._chance.random() < 0.2:
            self._observer.reassign(STRONG, partition, None)
            self.notes["moves called off"] += 1
        else:
            self._try(lambda: self._is_at(partition, ids[:2]), "moves that were not done in time")
        self._ask(partition, ids)
        self._try(lambda: self._is_at(partition, ids), "moves that were not done in time")

    def restore(self) -> None:
        """Everything on all nodes again."""
        wanted = sorted(self._cluster.nodes)

        def is_restored() -> bool:
            away = [number for number in range(PARTITIONS[STRONG]) if not self._is_at(number, wanted)]
            for partition in away:
                self._observer.reassign(STRONG, partition, wanted)
            return not away

        eventually(is_restored, within_s=2 * STEP_S, what="the last move")

    def _ask(self, partition: int, wanted: list[int]) -> None:
        self._try(
            lambda: self._observer.reassign(STRONG, partition, wanted) == "none",
            "moves that were not accepted",
        )

    def _is_at(self, partition: int, wanted: list[int]) -> bool:
        view = self._observer.newest()
        state = view.partitions.get((STRONG, partition)) if view else None
        return state is not None and state.replicas == tuple(wanted)

    def _try(self, check: Callable[[], bool], otherwise: str) -> None:
        """Under fire not everything can be done in time; what was not is told."""
        try:
            eventually(lambda: self._is_over or check(), within_s=STEP_S)
        except AssertionError:
            self.notes[otherwise] += 1
