"""What every campaign does: start a cluster, run clients, fire faults, read everything back, stop the nodes, judge.

A campaign is a subclass that supplies its clients, its faults and its checks. Each fault hits while clients work, and
the next one comes only when the clients have done some more work.
"""

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from tests.brokers import ClusterProcesses
from tests.chaos.checks import disks
from tests.chaos.checks.checker import Findings
from tests.chaos.command import ClusterPlan, Say, silent
from tests.chaos.network import ProxyProcess
from tests.chaos.outcome import Outcome
from tests.chaos.view import Observer
from tests.chaos.workload import ClientGaveUp, pick
from tests.ports import free_address
from tests.waiting import eventually

RECOVERY_S = 90.0
AWAY_S = (1.0, 4.0)  # how long a dead node stays away, unless it comes back at once

P = TypeVar("P", bound=ClusterPlan)
#: For each shape of a fault: its weight, and which node it hits now.
Victims = Mapping[str, tuple[int, Callable[[], int]]]


class ClusterCampaign(ABC, Generic[P]):
    node_settings: ClassVar[Mapping[str, str]] = {}
    #: The anomalies that the checks look for.
    anomalies: tuple[str, ...] = ()
    #: Topics and their partitions whose replicas must be equal on disk when all nodes have stopped.
    compared_topics: ClassVar[Mapping[str, int]] = {}

    def __init__(self, folder: Path, plan: P, say: Say = silent, proxy: ProxyProcess | None = None) -> None:
        self.folder = folder
        self.plan = plan
        self.say = say
        self.chance = random.Random(plan.seed)
        self.outcome = Outcome(plan.seed, self.anomalies)
        self.findings = Findings()
        self.cluster = ClusterProcesses(
            folder, count=plan.nodes, settings={**self.node_settings, **plan.settings}, doors=proxy
        )
        self.observer = self.new_observer()
        self.metrics_addresses = {n: free_address(node.host) for n, node in self.cluster.nodes.items()}
        for node_id, (host, port) in self.metrics_addresses.items():
            self.cluster.nodes[node_id].settings |= {"penstock.http.listen": f"{host}:{port}"}

    @property
    def servers(self) -> str:
        return self.cluster.bootstrap_servers

    def new_observer(self) -> Observer:
        return Observer(self.cluster)

    # -- what a campaign supplies ----------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Create topics and groups on the cluster that has just started."""

    @abstractmethod
    def clients(self) -> contextlib.AbstractContextManager[None]:
        """Run the clients; when the context ends, they end."""

    @abstractmethod
    def fire_faults(self) -> None:
        """Called while the clients run."""

    def read_everything(self) -> None:
        """Read what the checks need, after the clients have ended and before the nodes stop."""

    @abstractmethod
    def judge(self) -> None:
        """Add anomalies to `findings`, and figures to `outcome`."""

    def close(self) -> None:
        """Release what the campaign has opened besides the cluster."""

    # -- the course of a campaign ----------------------------------------------------------------------

    def run(self) -> Outcome:
        began = time.monotonic()
        try:
            with self.noted():
                self.cluster.start()
                self.prepare()
                with self.clients():
                    self.fire_faults()
            with self.noted():
                self.read_everything()
                self._stop_nodes()
        finally:
            self.cluster.kill()
            self.close()
        self.judge()
        self.outcome.anomalies = dict(self.findings.counts)
        self.outcome.examples = dict(self.findings.examples)
        self.outcome.duration_s = time.monotonic() - began
        return self.outcome

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A failure in the block is a problem in the outcome. The campaign goes on, and still reads and judges."""
        try:
            yield
        except (AssertionError, ClientGaveUp) as error:
            self.outcome.problems.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))

    def _stop_nodes(self) -> None:
        codes = self.cluster.stop()
        self.outcome.problems += [f"node {n} ended with {code}" for n, code in codes.items() if code]
        folders = {node.node_id: node.data_dir for node in self.cluster.nodes.values()}
        self.outcome.problems += disks.differences(folders, self.compared_topics)

    # -- faults ----------------------------------------------------------------------------------------

    def kill_one_of(self, kind: str, victims: Victims, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill a node, do something `meanwhile`, and start it again, at once or after a while."""
        shape = pick(self.chance, {name: weight for name, (weight, _) in victims.items()})
        node_id, ids = victims[shape][1](), list(self.cluster.nodes)
        # Without a leader, any node will do.
        node = self.cluster.nodes[node_id if node_id in ids else self.chance.choice(ids)]
        self.say(f"kill of node {node.node_id} ({shape})")
        self.outcome.fired[kind] += 1
        self.outcome.shapes[shape] += 1
        node.kill()
        meanwhile()
        if self.chance.random() < 0.6:
            time.sleep(self.chance.uniform(*AWAY_S))
        node.launch()

    def look_after_nodes(self) -> None:
        """Start nodes again that have ended on their own, and note that as a problem."""
        for node in self.cluster.nodes.values():
            if (code := node.exit_code) is not None:
                output = "".join(list(node.output)[-30:])
                self.outcome.problems.append(f"node {node.node_id} ended on its own ({code}):\n{output}")
                node.kill()
                node.launch()

    def await_whole(self, within_s: float = RECOVERY_S) -> None:
        wrong = self.observer.what_is_wrong
        eventually(lambda: not wrong(), within_s=within_s, what="all replicas in sync")
