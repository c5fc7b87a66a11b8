"""`python -m simulation`: run seeds, replay one, measure the sized cluster, or hunt classic bugs."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from functools import partial

from simulation.campaign import Tally, failure_lines, hunts, outcomes
from simulation.mutations import MUTATIONS
from simulation.run import run_seed
from simulation.sized import run_sized
from simulation.worlds import WORLDS

_print = partial(print, flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.mutations:
        return _hunt(options)
    if options.world == "sized":
        return _sized(options)
    if options.seed is not None:
        return _replay(options)
    return _campaign(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many; 0 runs until --minutes are over")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, help="stop after this long")
    parser.add_argument("--world", choices=(*WORLDS, "sized"), default="small")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything that happens")
    parser.add_argument("--mutations", action="store_true", help="switch on one classic bug after the other")
    parser.add_argument("--only", help="with --mutations: names, separated by commas")
    parser.add_argument("--json", action="store_true", help="tell the result as JSON, too")
    return parser


def _campaign(options: argparse.Namespace) -> int:
    tally, ends_at = Tally(), _end(options)
    for outcome in outcomes(_seeds(options, ends_at), workers=options.workers, world=options.world):
        tally.add(outcome)
        if not outcome.is_clean:
            for line in failure_lines(outcome):
                _print(line)
    for line in tally.lines():
        _print(line)
    if options.json:
        _print(tally.as_json())
    return 1 if tally.failures else 0


def _end(options: argparse.Namespace) -> float | None:
    return None if options.minutes is None else time.monotonic() + 60 * options.minutes


def _seeds(options: argparse.Namespace, ends_at: float | None) -> Iterator[int]:
    endless = options.seeds <= 0
    seeds = itertools.count(options.first) if endless else range(options.first, options.first + options.seeds)
    for seed in seeds:
        if ends_at is not None and time.monotonic() >= ends_at:
            return
        yield seed


def _replay(options: argparse.Namespace) -> int:
    outcome = run_seed(options.seed, tell=_print if options.trace else None, name=options.world)
    tally = Tally()
    tally.add(outcome)
    for line in (*tally.lines(), *(() if outcome.is_clean else failure_lines(outcome))):
        _print(line)
    return 0 if outcome.is_clean else 1


def _sized(options: argparse.Namespace) -> int:
    report = run_sized(options.seed if options.seed is not None else options.first)
    _print(report.as_json())
    for line in report.lines():
        _print(line)
    return 0


def _hunt(options: argparse.Namespace) -> int:
    names = options.only.split(",") if options.only else [mutation.name for mutation in MUTATIONS]
    missed = 0
    _print(f"{'bug':38} {'seeds':>5}  caught by")
    for catch in hunts(names, first_seed=options.first, seeds_max=options.seeds, workers=options.workers):
        missed += catch.invariant is None
        _print(f"{catch.name:38} {catch.seeds:5}  {catch.invariant or 'NOTHING'}")
    _print(f"{len(names) - missed} of {len(names)} bugs caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
