"""Real nodes, real clients, one fault after the other, and work in between; then the verdict."""

import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import checker, disks
from tests.chaos.faults import CUT, FREEZE, KILL, POWER, Faults, Hands, Hit
from tests.chaos.history import History, read
from tests.chaos.network import ProxyProcess
from tests.chaos.readers import Again, Last, Member, Tail
from tests.chaos.upkeep import REASSIGN, ROLLING, Upkeep
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
from tests.clusters import ClusterProcesses
from tests.waiting import eventually

RECOVERY_S = 60.0
FAIL_OVER_S = 6.0
JOIN_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of what. Between two faults at least `work` writes are acknowledged and as many deliveries made."""

    kills: int = 0
    freezes: int = 0
    cuts: int = 0
    powers: int = 0
    rolling: int = 0
    reassign: int = 0
    seed: int = 0
    nodes: int = 3
    work: int = 1000
    settings: dict[str, str] = field(default_factory=dict)

    def faults(self, chance: random.Random) -> list[str]:
        counts = {KILL: self.kills, FREEZE: self.freezes, CUT: self.cuts, POWER: self.powers}
        return _shuffled([kind for kind, count in counts.items() for _ in range(count)], chance)

    def chores(self, chance: random.Random) -> list[str]:
        return _shuffled([ROLLING] * self.rolling + [REASSIGN] * self.reassign, chance)


@dataclass(slots=True)
class Result:
    seed: int
    duration_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    upkeep: Counter[str] = field(default_factory=Counter)
    unavailable_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    least_work: dict[str, int] = field(default_factory=dict)
    bytes_lost: int = 0
    problems: list[str] = field(default_factory=list)  # what a cluster may not do, apart from anomalies
    notes: Counter[str] = field(default_factory=Counter)
    verdict: checker.Verdict = field(default_factory=checker.Verdict)

    @property
    def is_clean(self) -> bool:
        return self.verdict.is_clean and not self.problems


class Campaign:
    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None] = lambda words: None) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)
        self._result = Result(seed=plan.seed)
        self._proxy = ProxyProcess()
        self._cluster = ClusterProcesses(folder, count=plan.nodes, settings=plan.settings, doors=self._proxy)
        self._observer = Observer(self._cluster)
        self._hands = Hands(list(self._cluster.nodes))
        self._faults = Faults(self._cluster, self._proxy, self._observer, self._chance)
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._running: list[Client] = []
        chores = plan.chores(self._chance)
        self._upkeep = Upkeep(self._cluster, self._observer, self._hands, random.Random(plan.seed), chores)

    def run(self) -> Result:
        began = time.monotonic()
        try:
            self._cluster.start()
            create_topics(self._cluster.direct_servers, self._plan.nodes)
            with self._noted(), self._clients():
                self._fire_all()
            self._read_all()
            self._stop()
        except AssertionError as error:
            self._note(error)
        finally:
            self._cluster.kill()
            self._proxy.close()
            self._history.close()
        self._result.verdict = checker.check(read(self._history.path), weak_topics=[WEAK])
        self._result.upkeep, self._result.bytes_lost = self._upkeep.done, self._faults.bytes_lost
        self._result.notes.update(self._progress.troubles + self._upkeep.notes)
        self._result.duration_s = time.monotonic() - began
        return self._result

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """What ends the faults does not end the campaign: what was written is still read and judged."""
        try:
            yield
        except (AssertionError, ClientGaveUp) as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._result.problems.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))

    @contextlib.contextmanager
    def _clients(self) -> Iterator[None]:
        servers, common = self._cluster.bootstrap_servers, (self._history, self._progress)
        writers = [Writer(n, STRONG, servers, *common) for n in (1, 2)] + [Writer(3, WEAK, servers, *common)]
        readers: list[Client] = [
            *(Tail(topic, servers, *common) for topic in (STRONG, WEAK)),
            *(Member(n, servers, *common) for n in (1, 2)),
            Again(servers, *common, seed=self._plan.seed),
        ]
        self._running = [*writers, *readers]
        for client in self._running:
            client.start()
        try:
            yield
        finally:
            self._end_clients(writers, readers)

    def _end_clients(self, writers: list[Writer], readers: list[Client]) -> None:
        for client in writers:
            client.stop()
        for client in writers:
            client.join(JOIN_S)
        for reader in readers:
            reader.stop()
        for reader in readers:
            reader.join(JOIN_S)

    def _fire_all(self) -> None:
        self._await_work("start")
        self._upkeep.start()
        kinds = self._plan.faults(self._chance)
        for number, kind in enumerate(kinds):
            self._strike(kind)
            self._await_work(kind)
            self._upkeep.reached((number + 1) / len(kinds))
        self._upkeep.finish()
        if self._plan.reassign:
            self._upkeep.restore()

    def _strike(self, kind: str) -> None:
        shape, targets = self._faults.choose(kind)
        self._progress.take_worst_s()
        with self._hands.on(targets):
            self._note_deaths()
            hit = self._faults.fire(kind, shape, targets)
            self._say(hit.words)
            self._history.add("chaos", "info", "fault", "", [hit.words])
            self._linger(hit)
            hit.end()
            self._history.add("chaos", "info", "heal", "", [hit.words])
        self._result.fired[kind] += 1
        self._result.shapes[f"{kind}: {shape}"] += 1

    def _note_deaths(self) -> None:
        """A node that ended without being told to is started again, and that is a problem."""
        for node in self._cluster.nodes.values():
            if (code := node.exit_code) is not None:
                self._result.problems.append(
                    f"node {node.node_id} has died by itself ({code}):\n{''.join(list(node.output)[-30:])}"
                )
                node.kill()
                node.launch()

    def _linger(self, hit: Hit) -> None:
        """A dead node stays away until others have taken over, or comes back before anyone noticed."""
        alive = len(self._cluster.nodes) - len(hit.targets)
        if hit.lasting_s is not None:
            time.sleep(hit.lasting_s)
        elif alive > len(self._cluster.nodes) // 2 and self._chance.random() < 0.6:
            began = time.monotonic()
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self._progress.silent_since(began), within_s=FAIL_OVER_S)

    def _await_work(self, kind: str) -> None:
        """Until the cluster has proven that it lives: in every partition, and for long enough."""
        began, before = time.monotonic(), self._progress.counts()

        def is_done() -> bool:
            self._check_clients()
            acknowledged, delivered, committed = self._since(before)
            is_enough = acknowledged >= self._plan.work and delivered >= self._plan.work and committed > 0
            return is_enough and not self._progress.silent_since(began)

        try:
            eventually(is_done, within_s=RECOVERY_S, what=f"recovery from {kind}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None
        if self._chance.random() < 0.85:
            self._await_whole()
        self._note_work(before)
        self._result.unavailable_s[kind].append(self._progress.take_worst_s())

    def _check_clients(self) -> None:
        for client in self._running:
            if client.failure is not None:
                raise ClientGaveUp(f"{client.name} has failed") from client.failure

    def _await_whole(self) -> None:
        """Mostly the next fault meets a whole cluster; now and then one that is still catching up."""
        try:
            eventually(
                lambda: not self._observer.what_is_wrong(), within_s=RECOVERY_S / 2, what="catching up"
            )
        except AssertionError as error:
            if not self._plan.rolling and not self._plan.reassign:
                raise AssertionError(f"{error}; {self._state()}") from None
            self._result.notes["was not whole in time"] += 1

    def _state(self) -> str:
        silent, wrong = self._progress.silent_since(time.monotonic() - 5), self._observer.what_is_wrong()
        running = {node.node_id: node.is_ready for node in self._cluster.nodes.values()}
        return f"silent: {silent}; wrong: {wrong}; ready: {running}; exited: {self._exited()}"

    def _exited(self) -> dict[int, int]:
        codes = {node.node_id: node.exit_code for node in self._cluster.nodes.values()}
        return {node_id: code for node_id, code in codes.items() if code is not None}

    def _since(self, before: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(self._progress.counts(), before, strict=True))

    def _note_work(self, before: tuple[int, ...]) -> None:
        for name, count in zip(("acknowledged", "delivered", "committed"), self._since(before), strict=True):
            self._result.least_work[name] = min(count, self._result.least_work.get(name, count))

    def _read_all(self) -> None:
        eventually(
            lambda: not self._observer.what_is_wrong(), within_s=RECOVERY_S, what="a whole cluster at the end"
        )
        servers = self._cluster.bootstrap_servers
        last = [Last(topic, servers, self._history, self._progress) for topic in PARTITIONS]
        for reader in last:
            reader.start()
        for reader in last:
            reader.join(4 * JOIN_S)

    def _stop(self) -> None:
        codes = self._cluster.stop()
        self._result.problems += [f"node {n} ended with {code}" for n, code in codes.items() if code]
        folders = {node.node_id: node.data_dir for node in self._cluster.nodes.values()}
        self._result.problems += disks.differences(folders, PARTITIONS)


def _shuffled(items: list[str], chance: random.Random) -> list[str]:
    chance.shuffle(items)
    return items
