"""What campaigns against share groups and the schedule have in common: nodes that are killed for what they lead.

Each fault hits while there is work, and the next one comes only when so much more has been done.
"""

import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.checker import Findings
from tests.chaos.view import Observer
from tests.chaos.workload import pick
from tests.clusters import ClusterProcesses
from tests.ports import free_address
from tests.waiting import eventually

RECOVERY_S = 90.0
AWAY_S = (1.0, 4.0)  # how long a dead node stays away, unless it comes back at once


@dataclass(slots=True)
class Outcome:
    """`kinds` are the anomalies that were looked for, `figures` what else there is to tell."""

    seed: int
    kinds: tuple[str, ...]
    duration_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    work_between: list[int] = field(default_factory=list)  # from each fault to the next
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[str, float] = field(default_factory=dict)
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.anomalies and not self.problems

    @property
    def least_work(self) -> int:
        return min(self.work_between, default=0)


class Siege:
    """A cluster, the eyes on it, and the hand that kills its nodes."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        settings: Mapping[str, str],
        seed: int,
        kinds: tuple[str, ...],
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        self.chance = random.Random(seed)
        self.outcome = Outcome(seed, kinds)
        self.findings = Findings()
        self.cluster = ClusterProcesses(folder, count=nodes, settings=settings)
        self.observer = Observer(self.cluster)
        self.pages = {n: free_address(node.host) for n, node in self.cluster.nodes.items()}
        for node_id, (host, port) in self.pages.items():
            self.cluster.nodes[node_id].settings |= {"penstock.http.listen": f"{host}:{port}"}
        self._began_s = time.monotonic()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """What ends the faults does not end the campaign: what is there is still read and judged."""
        try:
            yield
        except AssertionError as error:
            self.outcome.problems.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))

    def kill(self, kind: str, shape: str, node_id: int) -> Callable[[], object]:
        """Returns what brings the node back. Where nobody leads, any node will do."""
        ids = list(self.cluster.nodes)
        node = self.cluster.nodes[node_id if node_id in ids else self.chance.choice(ids)]
        self.say(f"kill of node {node.node_id} ({shape})")
        self.outcome.fired[kind] += 1
        self.outcome.shapes[shape] += 1
        node.kill()
        return node.launch

    def kill_one_of(
        self,
        kind: str,
        victims: Mapping[str, tuple[int, Callable[[], int]]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`victims`: how likely each shape is, and who it is now. The node is back when this returns, or soon."""
        shape = pick(self.chance, {name: weight for name, (weight, _) in victims.items()})
        revive = self.kill(kind, shape, victims[shape][1]())
        meanwhile()
        if self.chance.random() < 0.6:  # or it is back before anyone noticed
            time.sleep(self.chance.uniform(*AWAY_S))
        revive()

    def look_after_nodes(self) -> None:
        """A node that ended without being told to is started again, and that is a problem."""
        for node in self.cluster.nodes.values():
            if (code := node.exit_code) is not None:
                said = "".join(list(node.output)[-30:])
                self.outcome.problems.append(f"node {node.node_id} has died by itself ({code}):\n{said}")
                node.kill()
                node.launch()

    def await_whole(self) -> None:
        wrong = self.observer.what_is_wrong
        eventually(lambda: not wrong(), within_s=RECOVERY_S, what="all replicas in sync")

    def finish(self) -> Outcome:
        """After the last word has been said about what was found."""
        self.outcome.anomalies = dict(self.findings.counts)
        self.outcome.examples = dict(self.findings.examples)
        self.outcome.duration_s = time.monotonic() - self._began_s
        return self.outcome

    def stop_nodes(self) -> None:
        codes = self.cluster.stop()
        self.outcome.problems += [f"node {n} ended with {code}" for n, code in codes.items() if code]
