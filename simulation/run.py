"""One seed: a world is built, worked in, broken, mended, and must work again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simulation.cluster import Cluster
from simulation.faults import Faults
from simulation.ledger import Violation
from simulation.workload import Workload
from simulation.world import World, told
from simulation.worlds import WORLDS

_START_MS_MAX: Final = 6_000
_FAULTS_MS: Final = (700, 2_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    world: str = "small"
    invariant: str | None = None
    story: str = ""
    recent: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    events: int = 0
    simulated_ms: int = 0
    #: Equal for equal runs.
    digest: int = 0

    @property
    def is_clean(self) -> bool:
        return self.invariant is None


def run_seed(
    seed: int,
    *,
    only: tuple[str, ...] = (),
    tell: Callable[[str], None] | None = None,
    name: str = "small",
) -> Outcome:
    """`only`: these kinds of faults, and no others. `name` is of one of the worlds."""
    world = World(seed, tell=tell)
    cluster, workload = WORLDS[name](world)
    faults = Faults(cluster, workload, only)
    invariant, story = None, ""
    try:
        _play(world, cluster, workload, faults)
    except Violation as violation:
        invariant, story = violation.invariant, violation.story
    except Exception as error:
        invariant, story = "an assertion of the code", f"{type(error).__name__} {_where(error)}"
    return Outcome(
        seed=seed,
        world=name,
        invariant=invariant,
        story=story,
        recent=tuple(told(note) for note in world.recent) if invariant is not None else (),
        counts=workload.counts,
        fired=faults.fired,
        events=world.events,
        simulated_ms=world.now_ms,
        digest=hash((world.events, world.now_ms, world.random.random())),
    )


def _play(world: World, cluster: Cluster, workload: Workload, faults: Faults) -> None:
    for machine in cluster.machines.values():
        cluster.start(machine)
    workload.start()
    if not world.run(_START_MS_MAX, lambda: workload.has_begun):
        raise Violation("progress", "nothing works after the start")
    faults.start(world.between(40, 250))
    world.run(world.now_ms + world.between(*_FAULTS_MS))
    faults.heal()
    workload.close()
    if not world.run(world.now_ms + workload.mend_ms_max, workload.is_done):
        raise Violation("progress", f"after the faults: {workload.unfinished()}")
    if not world.run(world.now_ms + workload.mend_ms_max, lambda: workload.incomplete() is None):
        raise Violation("in-sync sets recover", f"after the faults: {workload.incomplete()}")
    workload.finish()


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = (
        "" if trace is None else f"{trace.tb_frame.f_code.co_filename.rsplit('/', 2)[-1]}:{trace.tb_lineno}"
    )
    return f"{place} {error}"
