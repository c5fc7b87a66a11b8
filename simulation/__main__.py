"""`python -m simulation`: run seeds, repeat one, measure the sized cluster, or hunt mutations."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial

from simulation.campaign import Catch, Tally, failure_lines, hunts, outcomes, quiet_logs
from simulation.engine.system import preload
from simulation.mutations import MUTATIONS
from simulation.run import WORLDS, run_seed

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
    parser.add_argument("--world", choices=(*WORLDS, "sized"), help="only this one; otherwise all in turn")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="run this one only, in the world that --world names")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens")
    parser.add_argument("--mutations", action="store_true", help="apply one mutation after the other")
    parser.add_argument("--only", help="with --mutations: names, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, too")
    return parser


def _campaign(options: argparse.Namespace) -> int:
    tally = Tally()
    ends_at = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for outcome in outcomes(_jobs(options, ends_at), workers=options.workers):
        tally.add(outcome)
        if not outcome.is_clean:
            for line in failure_lines(outcome):
                _print(line)
        if ends_at is not None and time.monotonic() >= ends_at:
            break  # the pool has taken on more jobs than it has finished
    for line in tally.lines():
        _print(line)
    if options.json:
        _print(tally.as_json())
    return 1 if tally.failures else 0


def _jobs(options: argparse.Namespace, ends_at: float | None) -> Iterator[tuple[str, int]]:
    names = tuple(WORLDS) if options.world is None else (options.world,)
    endless = options.seeds <= 0
    seeds = itertools.count(options.first) if endless else range(options.first, options.first + options.seeds)
    for number, seed in enumerate(seeds):
        if ends_at is not None and time.monotonic() >= ends_at:
            return
        yield names[number % len(names)], seed


def _replay(options: argparse.Namespace) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of strings must be that of the campaign.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, (sys.executable, "-m", "simulation", *sys.argv[1:]))
    preload()
    quiet_logs()
    world = options.world or next(iter(WORLDS))
    outcome = run_seed(options.seed, world=world, on_note=_print if options.trace else None)
    tally = Tally()
    tally.add(outcome)
    for line in (*tally.lines(), *(() if outcome.is_clean else failure_lines(outcome))):
        _print(line)
    _print(f"digest {outcome.digest:08x}")
    os._exit(0 if outcome.is_clean else 1)  # without running `finally` blocks of killed nodes


def _sized(options: argparse.Namespace) -> int:
    from simulation.sized import run_sized

    report = run_sized(options.seed if options.seed is not None else options.first)
    _print(report.as_json())
    for line in report.lines():
        _print(line)
    sys.stdout.flush()
    os._exit(0)


def _hunt(options: argparse.Namespace) -> int:
    names = set(options.only.split(",")) if options.only else None
    chosen = [each for each in MUTATIONS if names is None or each.name in names]
    unknown = (names or set()) - {each.name for each in chosen}
    if unknown:
        _print(f"unknown mutations: {', '.join(sorted(unknown))}")
        return 2
    caught: list[Catch] = []
    _print(f"{'mutation':38} {'seeds':>5}  caught by")
    for catch in hunts(chosen, first_seed=options.first, seeds_max=options.seeds, workers=options.workers):
        caught.append(catch)
        _print(f"{catch.name:38} {catch.seeds:5}  {catch.invariant or 'NOTHING'}")
    missed = sum(catch.invariant is None for catch in caught)
    _print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    if options.json:
        _print(
            json.dumps(
                [{"mutation": each.name, "seeds": each.seeds, "caught_by": each.invariant} for each in caught]
            )
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
