"""Many seeds: spread over processes, counted together, and reported so that a failure can be repeated."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Final, NamedTuple, TypeVar

from simulation.mutation import Mutation
from simulation.mutations import MUTATIONS
from simulation.run import Outcome, run_seed

#: Runs leave memory and file descriptors behind, so a process is replaced after a few.
_RUNS_PER_PROCESS: Final = 12

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class Tally:
    """The results of a campaign so far."""

    seeds: int = 0
    events: int = 0
    virtual_ms: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.virtual_ms += outcome.virtual_ms
        self.counts.update(outcome.counts)
        self.fired.update(outcome.fired)
        if not outcome.is_clean:
            self.failures.append(outcome)

    def as_json(self) -> str:
        return json.dumps(
            {
                "seeds": self.seeds,
                "events": self.events,
                "virtual_ms": self.virtual_ms,
                "operations": dict(sorted(self.counts.items())),
                "faults": dict(sorted(self.fired.items())),
                "failures": [
                    {"world": failure.world, "seed": failure.seed, "invariant": failure.invariant}
                    for failure in self.failures
                ],
            }
        )

    def lines(self) -> Iterator[str]:
        yield f"{self.seeds} seeds, {self.events} events in {self.virtual_ms / 1000:.0f} virtual seconds"
        yield "operations: " + ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        yield "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(self.fired.items()))
        yield f"{len(self.failures)} failures"
        for failure in self.failures:
            yield f"  seed {failure.seed} of world {failure.world}: {failure.invariant}"


class Catch(NamedTuple):
    """`seeds` is how many it took; `invariant` is None if none of them caught the mutation."""

    name: str
    seeds: int
    invariant: str | None
    seed: int = -1
    story: str = ""


def outcomes(jobs: Iterable[tuple[str, int]], *, workers: int) -> Iterator[Outcome]:
    """Run seeds, given with their worlds; outcomes come in any order."""
    yield from in_processes(_run, jobs, workers=workers)


def _run(job: tuple[str, int]) -> Outcome:
    world, seed = job
    return run_seed(seed, world=world)


def hunts(mutations: Iterable[Mutation], *, first_seed: int, seeds_max: int, workers: int) -> Iterator[Catch]:
    """Run seeds with each mutation until one fails that is clean without it; catches come in any order."""
    jobs = [(each.name, first_seed, seeds_max) for each in mutations]
    yield from in_processes(_hunt, jobs, workers=workers, runs_per_process=1)


def _hunt(job: tuple[str, int, int]) -> Catch:
    name, first_seed, seeds_max = job
    for number in range(seeds_max):
        caught = _in_child(partial(attempt, name, first_seed + number))
        if caught is not None:
            return caught._replace(seeds=number + 1)
    return Catch(name, seeds_max, None)


def attempt(name: str, seed: int) -> Catch | None:
    """Run one seed with a mutation, and without it if it fails. Returns None if the seed does not catch it."""
    mutation = next(each for each in MUTATIONS if each.name == name)
    with mutation.applied():
        outcome = run_seed(seed, world=mutation.world, only=mutation.faults, apis=mutation.apis)
    if outcome.is_clean:
        return None
    if not run_seed(seed, world=mutation.world, only=mutation.faults, apis=mutation.apis).is_clean:
        return None
    return Catch(name, 1, outcome.invariant, seed, outcome.story)


def failure_lines(outcome: Outcome) -> Iterator[str]:
    """The seed, what broke, what happened before, and how to repeat it."""
    yield f"seed {outcome.seed} of world {outcome.world} broke: {outcome.invariant}"
    yield f"  {outcome.story}"
    yield from (f"  {line}" for line in outcome.notes[-60:])
    yield f"replay: python -m simulation --world {outcome.world} --seed {outcome.seed} --trace"


# -- processes -----------------------------------------------------------------------------------------


def in_processes(
    call: Callable[[Job], Result],
    jobs: Iterable[Job],
    *,
    workers: int,
    runs_per_process: int = _RUNS_PER_PROCESS,
) -> Iterator[Result]:
    # The order of sets of strings must be the same in every process.
    os.environ["PYTHONHASHSEED"] = "0"
    context = get_context("forkserver")
    context.set_forkserver_preload(["simulation.preloaded"])
    with context.Pool(workers, maxtasksperchild=runs_per_process) as pool:
        yield from pool.imap_unordered(call, jobs, chunksize=1)


def _in_child(call: Callable[[], Result]) -> Result:
    """Run a call in a process of its own, forked from this one, and return its result."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(send, "wb") as file:
                pickle.dump(call(), file)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    result: Any = pickle.loads(data)
    return result  # type: ignore[no-any-return]


def quiet_logs() -> None:
    """What nodes log goes to the notes of a run only."""
    logger = logging.getLogger("penstock")
    logger.setLevel(logging.INFO)
    logger.propagate = False
