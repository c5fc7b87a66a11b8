"""`--campaign nodes`: nodes are killed, frozen, cut off, lose power; nothing acknowledged with acks=all may be lost."""

import contextlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.campaign import ClusterCampaign
from tests.chaos.checks import checker
from tests.chaos.checks.history import History, read
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.network import ProxyProcess
from tests.chaos.nodes.faults import CUT, FREEZE, KILL, OUTAGE, POWER, Faults, Hands, Hit
from tests.chaos.nodes.secure import Security
from tests.chaos.nodes.upkeep import CERTIFICATES, REASSIGN, ROLLING, Upkeep
from tests.chaos.readers import Again, Last, Member, Tail
from tests.chaos.view import Observer
from tests.chaos.workload import (
    PARTITIONS,
    STRONG,
    WEAK,
    Client,
    ClientGaveUp,
    Progress,
    Writer,
    create_topics,
)
from tests.repeat import busy_processes
from tests.waiting import eventually

RECOVERY_S = 60.0
FAIL_OVER_S = 6.0
JOIN_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    kills: int = option(20, "kill -9 of leaders, controllers, pairs and all nodes")
    freezes: int = option(10, "SIGSTOP for a while")
    cuts: int = option(10, "partitions of the network, both ways and one way")
    power: int = option(10, "kill -9, and every file is cut back to what was synced")
    outages: int = option(0, "kill -9 of all nodes, which start again at once")
    busy: int = option(0, "processes that keep one core each busy meanwhile")
    rolling: int = option(1, "rolling restarts meanwhile")
    reassign: int = option(3, "reassignments of partitions meanwhile")
    secure: bool = option(
        False,
        "TLS, SCRAM and access rules, and certificates that are replaced meanwhile",
        action="store_true",
    )
    certificates: int = option(5, "replacements of all certificates meanwhile, with --secure")
    work: int = option(1000, "acknowledged writes, and deliveries, between two faults at least")

    def faults(self, chance: random.Random) -> list[str]:
        counts = {
            KILL: self.kills,
            FREEZE: self.freezes,
            CUT: self.cuts,
            POWER: self.power,
            OUTAGE: self.outages,
        }
        return _shuffled([kind for kind, count in counts.items() for _ in range(count)], chance)

    def chores(self, chance: random.Random) -> list[str]:
        certificates = [CERTIFICATES] * self.certificates if self.secure else []
        return _shuffled([ROLLING] * self.rolling + [REASSIGN] * self.reassign + certificates, chance)


class Campaign(ClusterCampaign[Plan]):
    anomalies = checker.ANOMALIES
    compared_topics = PARTITIONS

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        self._proxy = ProxyProcess()
        self._security: Security | None = None
        super().__init__(folder, plan, say, self._proxy)
        self._hands = Hands(list(self.cluster.nodes))
        self._faults = Faults(self.cluster, self._proxy, self.observer, self.chance)
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._running: list[Client] = []
        self._outage_phases: defaultdict[str, list[float]] = defaultdict(list)
        chores = plan.chores(self.chance)
        self._upkeep = Upkeep(
            self.cluster,
            self.observer,
            self._hands,
            random.Random(plan.seed),
            chores,
            self._security.replace_certificates if self._security else lambda: None,
        )

    def new_observer(self) -> Observer:
        if not self.plan.secure:
            return super().new_observer()
        self._security = Security(self.folder, self.cluster)
        return Observer(self.cluster, self._security.connected)

    def _client_security(self) -> dict[str, str]:
        return self._security.client_settings() if self._security else {}

    def prepare(self) -> None:
        if self._security:
            self._security.prepare()
        create_topics(self.cluster.direct_servers, self.plan.nodes, security=self._client_security())

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        common = (self.servers, self._history, self._progress)
        security = self._client_security()
        writers = [
            *(Writer(n, STRONG, *common, security=security) for n in (1, 2)),
            Writer(3, WEAK, *common, security=security),
        ]
        readers: list[Client] = [
            *(Tail(topic, *common, security=security) for topic in (STRONG, WEAK)),
            *(Member(n, *common, security=security) for n in (1, 2)),
            Again(*common, seed=self.plan.seed, security=security),
        ]
        self._running = [*writers, *readers]
        for client in self._running:
            client.start()
        try:
            yield
        finally:
            for group in (writers, readers):
                for client in group:
                    client.stop()
                for client in group:
                    client.join(JOIN_S)

    def fire_faults(self) -> None:
        self._await_work("start")
        epoch = self.observer.quorum_epoch()
        with busy_processes(self.plan.busy):
            self._fire_faults()
        self.outcome.figures["epochs of the quorum meanwhile"] = self.observer.quorum_epoch() - epoch

    def _fire_faults(self) -> None:
        self._upkeep.start()
        kinds = self.plan.faults(self.chance)
        for number, kind in enumerate(kinds):
            self._strike(kind)
            self._await_work(kind)
            self._upkeep.reached((number + 1) / len(kinds))
        self._upkeep.finish()
        if self.plan.reassign:
            self._upkeep.restore()

    def _strike(self, kind: str) -> None:
        shape, targets = self._faults.choose(kind)
        self._progress.take_worst_s()
        with self._hands.on(targets):
            self.look_after_nodes()
            hit = self._faults.fire(kind, shape, targets)
            self.say(hit.words)
            self._history.add("chaos", "info", "fault", "", [hit.words])
            self._linger(hit)
            hit.end()
            if kind == OUTAGE:
                self._time_recovery()
            self._history.add("chaos", "info", "heal", "", [hit.words])
        self.outcome.fired[kind] += 1
        self.outcome.shapes[f"{kind}: {shape}"] += 1

    def _linger(self, hit: Hit) -> None:
        """A dead node stays away until others have taken over, or comes back before anyone noticed."""
        alive = len(self.cluster.nodes) - len(hit.targets)
        if hit.lasting_s is not None:
            time.sleep(hit.lasting_s)
        elif alive > len(self.cluster.nodes) // 2 and self.chance.random() < 0.6:
            began = time.monotonic()
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self._progress.silent_since(began), within_s=FAIL_OVER_S)

    def _time_recovery(self) -> None:
        """What the time goes into from the start of all nodes to the first acknowledgement in each partition."""
        began = time.monotonic()
        phases: dict[str, Callable[[], bool]] = {
            "a controller is elected": lambda: self.observer.controller() > 0,
            "all nodes are ready": lambda: all(node.is_ready for node in self.cluster.nodes.values()),
            "every partition acknowledges": lambda: not self._progress.silent_since(began),
        }
        for phase, is_over in phases.items():
            eventually(is_over, within_s=RECOVERY_S, what=f"after an outage, {phase}")
            self._outage_phases[phase].append(time.monotonic() - began)

    def _await_work(self, kind: str) -> None:
        """Until the cluster has proven that it lives: in every partition, and for long enough."""
        began, before = time.monotonic(), self._progress.counts()

        def is_done() -> bool:
            self._check_clients()
            acknowledged, delivered, committed = self._since(before)
            is_enough = acknowledged >= self.plan.work and delivered >= self.plan.work and committed > 0
            return is_enough and not self._progress.silent_since(began)

        try:
            eventually(is_done, within_s=RECOVERY_S, what=f"recovery from {kind}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None
        if self.chance.random() < 0.85:
            self._await_whole()
        self._note_work(before)
        self.outcome.recovery_s[kind].append(self._progress.take_worst_s())

    def _check_clients(self) -> None:
        for client in self._running:
            if client.failure is not None:
                raise ClientGaveUp(f"{client.name} has failed") from client.failure

    def _await_whole(self) -> None:
        """Mostly the next fault meets a whole cluster; now and then one that is still catching up."""
        try:
            self.await_whole(RECOVERY_S / 2)
        except AssertionError as error:
            if not self.plan.rolling and not self.plan.reassign:
                raise AssertionError(f"{error}; {self._state()}") from None
            self._upkeep.notes["was not whole in time"] += 1

    def _state(self) -> str:
        silent, wrong = self._progress.silent_since(time.monotonic() - 5), self.observer.what_is_wrong()
        running = {node.node_id: node.is_ready for node in self.cluster.nodes.values()}
        return f"silent: {silent}; wrong: {wrong}; ready: {running}; exited: {self._exited()}"

    def _exited(self) -> dict[int, int]:
        codes = {node.node_id: node.exit_code for node in self.cluster.nodes.values()}
        return {node_id: code for node_id, code in codes.items() if code is not None}

    def _since(self, before: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(self._progress.counts(), before, strict=True))

    def _note_work(self, before: tuple[int, ...]) -> None:
        done = self._since(before)
        self.outcome.work_between.append(min(done[:2]))
        for name, count in zip(("acknowledged", "delivered", "committed"), done, strict=True):
            figure = f"least {name} between two faults"
            self.outcome.figures[figure] = min(count, self.outcome.figures.get(figure, count))

    def read_everything(self) -> None:
        self.await_whole(RECOVERY_S)
        security = self._client_security()
        last = [
            Last(topic, self.servers, self._history, self._progress, security=security)
            for topic in PARTITIONS
        ]
        for reader in last:
            reader.start()
        for reader in last:
            reader.join(4 * JOIN_S)

    def close(self) -> None:
        self._proxy.close()
        self._history.close()

    def judge(self) -> None:
        verdict = checker.check(read(self._history.path), weak_topics=[WEAK])
        self.findings.counts.update(verdict.anomalies)
        self.findings.examples.update(verdict.examples)
        # No client does anything that it may not do, whatever happens to the nodes.
        self.outcome.problems += [
            f"{count} times {what}"
            for what, count in self._progress.troubles.items()
            if what.endswith(("AUTHENTICATION", "AUTHENTICATION_FAILED", "AUTHORIZATION_FAILED"))
        ]
        self.outcome.figures |= {
            **dict(sorted(verdict.operations.items())),
            **{f"reported: {name}": count for name, count in sorted(verdict.reported.items())},
            "bytes that power losses took": self._faults.bytes_lost,
            **{
                f"after an outage, {phase}": f"median {statistics.median(times):.1f} s, longest {max(times):.1f} s"
                for phase, times in self._outage_phases.items()
            },
            **self._upkeep.done,
            **(self._progress.troubles + self._upkeep.notes),
        }


def _shuffled(items: list[str], chance: random.Random) -> list[str]:
    chance.shuffle(items)
    return items
