"""One seed: a cluster is started, used, broken, repaired, and must work again.

A run must have a process of its own, or share it with a few others only: nodes that were killed leave tasks behind
that must never run again, so they stay in memory until the process ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simulation.checks.committed import CommittedLogs
from simulation.checks.coordinators import Coordinators
from simulation.checks.metadata import CommittedMetadata
from simulation.cluster import Cluster
from simulation.engine.loop import CURRENT, OUTSIDE, Violation, VirtualLoop
from simulation.engine.network import Network
from simulation.engine.system import simulated
from simulation.faults import Faults, Operator
from simulation.worlds import consumer, data, schedule, share, transactions
from simulation.worlds.base import World

_START_S_MAX: Final = 20.0
_FAULTS_S: Final = (1.5, 4.0)
_MEMORY: Final = Path("/dev/shm")
#: Loops of finished runs: see the docstring of the module.
_finished: list[Any] = []

WORLDS: Final[dict[str, type[World]]] = {
    "data": data.DataWorld,
    "transactions": transactions.TransactionWorld,
    "schedule": schedule.ScheduleWorld,
    "share": share.ShareWorld,
    "consumer": consumer.ConsumerWorld,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    world: str
    invariant: str | None = None
    story: str = ""
    notes: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    events: int = 0
    virtual_ms: int = 0
    #: Equal for equal runs.
    digest: int = 0

    @property
    def is_clean(self) -> bool:
        return self.invariant is None


def run_seed(
    seed: int,
    *,
    world: str = "data",
    only: tuple[str, ...] = (),
    apis: tuple[int, ...] = (),
    on_note: Callable[[str], None] | None = None,
) -> Outcome:
    """`only` names the kinds of faults to use, `apis` the requests that may be late; empty: any."""
    loop = VirtualLoop(seed, on_note=on_note)
    network = Network(loop)
    folder = Path(
        tempfile.mkdtemp(prefix="penstock-simulation-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    )
    loop.folder = str(folder)
    counts: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    violation: Violation | None = None
    handler = _LogNotes(loop)
    logging.getLogger("penstock").addHandler(handler)
    try:
        with simulated(loop, network, seed):
            build = WORLDS[world]
            cluster = Cluster(loop, network, folder, settings=build.settings)
            committed = CommittedLogs(cluster)
            metadata = CommittedMetadata(committed)
            with committed.observing(), metadata.observing(), Coordinators(committed).observing():
                workload = build(cluster, committed)
                counts = workload.counts
                operator = Operator(cluster, 201, counts)
                faults = Faults(cluster, committed, operator, lambda: workload.clients, only, apis)
                fired = faults.fired
                try:
                    with workload.observing():
                        _play(loop, cluster, committed, workload, faults)
                    metadata.check_nodes()
                except Violation as broken:
                    violation = broken
                except Exception as error:
                    violation = Violation(
                        "no check fails with an error", traceback.format_exc(limit=-4) + repr(error)
                    )
                finally:
                    for machine in cluster.machines.values():
                        machine.restarts = False
                        machine.kill()
    finally:
        logging.getLogger("penstock").removeHandler(handler)
        shutil.rmtree(folder, ignore_errors=True)
        _finished.append((loop, network, cluster))
    return Outcome(
        seed=seed,
        world=world,
        invariant=None if violation is None else violation.invariant,
        story="" if violation is None else violation.story,
        notes=() if violation is None else tuple(map(loop.format_note, loop.notes)),
        counts=counts,
        fired=fired,
        events=loop.steps,
        virtual_ms=loop.now_ms,
        digest=loop.digest,
    )


def _play(
    loop: VirtualLoop, cluster: Cluster, committed: CommittedLogs, world: World, faults: Faults
) -> None:
    loop.call_soon(cluster.start, context=OUTSIDE)
    world.admin.spawn(world.start())
    if not loop.run_for(_START_S_MAX, lambda: world.has_begun):
        raise Violation("progress", "nothing works after the start")
    faults.start(loop.between(0.1, 0.6))
    loop.run_for(loop.between(*_FAULTS_S))
    faults.heal()
    world.close()
    if not loop.run_for(world.recovery_s, lambda: cluster.unhealthy() is None):
        raise Violation("the cluster recovers", f"after the faults: {cluster.unhealthy()}")
    if not loop.run_for(world.recovery_s, lambda: world.unfinished() is None):
        raise Violation("clients recover", f"after the faults: {world.unfinished()}")
    if not loop.run_for(world.recovery_s, lambda: cluster.unhealthy() is None):
        raise Violation("the cluster recovers", f"at the end: {cluster.unhealthy()}")
    world.finish()
    committed.check_replicas()
    loop.note("end", loop.random.random())


#: The attributes that every log record has; others are the fields that the node has added.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({})))


class _LogNotes(logging.Handler):
    """Adds what nodes log to the notes of the run."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.INFO)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        if process is None or process.is_over:
            return
        reason = "" if record.exc_info is None or record.exc_info[1] is None else repr(record.exc_info[1])
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        self._loop.note(f"  {process.name} {record.levelname.lower()}", record.getMessage(), extra, reason)
