"""The sized cluster of the requirements: 90 brokers in 9 racks, 200 partitions x 3. How long is a partition away?

Timeouts are the product's defaults. A partition is away from the moment its leader's machine loses power until a
record sent to the new leader is acknowledged. A machine without power closes no connections, so no peer learns
anything before a timeout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from penstock.cluster.image import PartitionState
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from simulation.checks.committed import CommittedLogs
from simulation.client import CREATE_TOPICS, Client, message
from simulation.cluster import Cluster, TopicShape
from simulation.engine.loop import OUTSIDE, Violation, VirtualLoop
from simulation.engine.machine import Machine
from simulation.engine.network import Network
from simulation.engine.system import simulated

_CONTROLLERS: Final = 3
_PARTITIONS: Final = 200
_TOPIC: Final = TopicShape("orders", _PARTITIONS)
_SETTINGS: Final = {"penstock.disk.reserve.bytes": "0", "min.insync.replicas": "2"}
_PROBE_S: Final = 0.1
_PATIENCE_S: Final = 60.0
#: How often to look whether something has happened: to look at 90 nodes is not cheap.
_LOOK_S: Final = 0.1
_MEMORY: Final = Path("/dev/shm")
#: Loops of finished runs: nodes that lost power leave tasks behind that must never run again.
_finished: list[Any] = []


class FailOver(NamedTuple):
    """Virtual milliseconds without acknowledgements, over the partitions that lost their leader."""

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
    """Sends one record after the other to each partition, and notes when the first is acknowledged again."""

    def __init__(self, cluster: Cluster, committed: CommittedLogs, counts: Counter[str]) -> None:
        super().__init__(cluster, 1, counts)
        self.committed = committed
        self.away_ms: dict[int, int] = {}
        self._watched = 0

    def watch(self, partitions: list[int]) -> None:
        self._watched = len(partitions)
        self.away_ms = {}
        for index in partitions:
            self.spawn(self._probe(index, self.loop.now_ms))

    @property
    def is_done(self) -> bool:
        return len(self.away_ms) == self._watched

    async def _probe(self, index: int, since_ms: int) -> None:
        while True:
            self.counts["sent"] += 1
            values = (b"p%d" % self.counts["sent"],)
            batch = encode_batch([Record(0, 1, None, values[0])])
            reply = await self.produce(_TOPIC.name, index, batch)
            if reply is not None and reply[0] is ErrorCode.none:
                self.committed.acknowledged(_TOPIC.name, index, reply[1], values)
                self.counts["acknowledged"] += 1
                self.away_ms[index] = self.loop.now_ms - since_ms
                return
            await asyncio.sleep(_PROBE_S)


class SizedWorld:
    def __init__(self, loop: VirtualLoop, cluster: Cluster, committed: CommittedLogs) -> None:
        self.loop = loop
        self.cluster = cluster
        self.counts: Counter[str] = Counter()
        self.prober = Prober(cluster, committed, self.counts)

    def start(self) -> None:
        self.loop.call_soon(self.cluster.start, context=OUTSIDE)
        self._until(self._is_ready, "the brokers do not register")
        self.prober.spawn(self._create())
        self._until(self._is_led, "the partitions have no leaders")
        self._measure(list(range(_PARTITIONS)))

    def fail(self, what: str, machines: list[Machine]) -> FailOver:
        """These lose power at once. Afterwards they come back, and all replicas are in sync again."""
        ids = {machine.node_id for machine in machines}
        led = [index for index, state in self._states().items() if state.leader in ids]
        self.loop.note("FAULT power loss", what, sorted(ids))
        for machine in machines:
            machine.lose_power()
        away_ms = self._measure(led)
        for machine in machines:
            self.loop.call_soon(machine.start, context=OUTSIDE)
        self._until(self._is_in_sync, f"not in sync after {what}")
        return FailOver(what, len(ids), len(led), int(median(away_ms)), max(away_ms))

    def _measure(self, partitions: list[int]) -> list[int]:
        self.prober.watch(partitions)
        self._until(lambda: self.prober.is_done, "partitions acknowledge nothing")
        return list(self.prober.away_ms.values())

    async def _create(self) -> None:
        new = message(CREATE_TOPICS, 7)
        topic = new(
            "CreatableTopic",
            name=_TOPIC.name,
            num_partitions=_TOPIC.partitions,
            replication_factor=_TOPIC.replication_factor,
            assignments=(),
            configs=(),
        )
        request = new(
            "CreateTopicsRequest", topics=(topic,), timeout=timedelta(seconds=10), validate_only=False
        )
        await self.prober.call(self.prober.any_node(), CREATE_TOPICS, 7, request, timeout_s=20)

    def _is_ready(self) -> bool:
        active = self.cluster.active_controller()
        return active is not None and len(active.metadata.image.active_brokers()) == len(
            self.cluster.machines
        )

    def _is_led(self) -> bool:
        states = self._states()
        return len(states) == _PARTITIONS and all(state.has_leader for state in states.values())

    def _is_in_sync(self) -> bool:
        return self._is_ready() and all(len(state.isr) == 3 for state in self._states().values())

    def _states(self) -> dict[int, PartitionState]:
        topic = self.cluster.image.topics.get(_TOPIC.name)
        return {} if topic is None else dict(topic.partitions)

    def _until(self, is_done: Callable[[], bool], otherwise: str) -> None:
        ends_at = self.loop.now + _PATIENCE_S
        while not is_done():
            if self.loop.now >= ends_at:
                raise Violation("progress", otherwise)
            self.loop.run_for(_LOOK_S)


def run_sized(
    seed: int, *, brokers: int = 90, racks: int = 9, on_note: Callable[[str], None] | None = None
) -> SizedReport:
    """Two brokers and a whole rack lose power, one after the other. Three of the brokers are controllers, too."""
    loop = VirtualLoop(seed, on_note=on_note)
    network = Network(loop)
    folder = Path(tempfile.mkdtemp(prefix="penstock-sized-", dir=_MEMORY if _MEMORY.is_dir() else None))
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with simulated(loop, network, seed):
            cluster = Cluster(
                loop, network, folder, nodes=brokers, settings=_SETTINGS, timeouts={}, racks=racks
            )
            committed = CommittedLogs(cluster)
            with committed.observing():
                try:
                    return _run(loop, cluster, committed)
                finally:
                    for machine in cluster.machines.values():
                        machine.restarts = False
                        machine.kill()
    finally:
        logger.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)
        _finished.append((loop, network))


def _run(loop: VirtualLoop, cluster: Cluster, committed: CommittedLogs) -> SizedReport:
    sized = SizedWorld(loop, cluster, committed)
    sized.start()
    racks = sorted(set(cluster.racks.values()))
    by_rack = {
        rack: [cluster.machines[number] for number, its in cluster.racks.items() if its == rack]
        for rack in racks
    }
    # Racks without a controller: a fail-over of the quorum is not what is measured here.
    *_, one_rack, other_rack, lost_rack = racks
    fail_overs = (
        sized.fail("one broker", by_rack[one_rack][:1]),
        sized.fail("another broker", by_rack[other_rack][-1:]),
        sized.fail("one rack", by_rack[lost_rack]),
    )
    some = next(iter(cluster.serving()))
    return SizedReport(
        brokers=len(cluster.machines),
        controllers=_CONTROLLERS,
        racks=len(racks),
        partitions=_PARTITIONS,
        session_ms=some.settings.integer("broker.session.timeout.ms"),
        events=loop.steps,
        acknowledged=sized.counts["acknowledged"],
        fail_overs=fail_overs,
    )
