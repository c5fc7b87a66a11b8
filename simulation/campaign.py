"""Many seeds at once: spread over processes, counted together, and told in a way that can be acted on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Final

from simulation.mutations import MUTATIONS, Catch, hunt
from simulation.run import Outcome, run_seed

#: Seeds handed to a process at once: small, so that a failure is told soon.
_CHUNK: Final = 10


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a campaign has come to."""

    seeds: int = 0
    events: int = 0
    simulated_ms: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.simulated_ms += outcome.simulated_ms
        self.counts.update(outcome.counts)
        self.fired.update(outcome.fired)
        if not outcome.is_clean:
            self.failures.append(outcome)

    def as_json(self) -> str:
        return json.dumps(
            {
                "seeds": self.seeds,
                "events": self.events,
                "simulated_ms": self.simulated_ms,
                "operations": dict(sorted(self.counts.items())),
                "faults": dict(sorted(self.fired.items())),
                "failures": [
                    {"seed": failure.seed, "invariant": failure.invariant} for failure in self.failures
                ],
            }
        )

    def lines(self) -> Iterator[str]:
        yield f"{self.seeds} seeds, {self.events} events in {self.simulated_ms / 1000:.0f} simulated seconds"
        yield "operations: " + ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        yield "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(self.fired.items()))
        yield f"{len(self.failures)} failures"
        for failure in self.failures:
            yield f"  seed {failure.seed}: {failure.invariant}"


def outcomes(seeds: Iterable[int], *, workers: int, world: str = "small") -> Iterator[Outcome]:
    """In whatever order they come; each seed runs alone and the same everywhere."""
    run = partial(run_seed, name=world)
    if workers <= 1:
        yield from map(run, seeds)
        return
    # Forked children would share whatever the caller has open.
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=_CHUNK)


def hunts(names: Iterable[str], *, first_seed: int, seeds_max: int, workers: int) -> Iterator[Catch]:
    """Every bug of these names, in the order of the names."""
    jobs = [(name, first_seed, seeds_max) for name in names]
    if workers <= 1:
        yield from map(_hunt, jobs)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_hunt, jobs)


def _hunt(job: tuple[str, int, int]) -> Catch:
    name, first_seed, seeds_max = job
    mutation = next(each for each in MUTATIONS if each.name == name)
    return hunt(mutation, first_seed=first_seed, seeds_max=seeds_max)


def failure_lines(outcome: Outcome) -> Iterator[str]:
    """What one needs to go on: the seed, what broke, what came before, and how to see it again."""
    yield f"seed {outcome.seed} of world {outcome.world} broke: {outcome.invariant}"
    yield f"  {outcome.story}"
    yield from (f"  {line}" for line in outcome.recent[-40:])
    yield f"replay: python -m simulation --world {outcome.world} --seed {outcome.seed} --trace"
