"""What `python -m benchmarks.contracts` and `python -m benchmarks.spark` have in common: contests side by side."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from benchmarks.brokers.broker import Broker, PenstockBroker
from benchmarks.brokers.kafka import KafkaBroker, PeerUnavailable, fetch_kafka
from benchmarks.reports.results_file import (
    add_json_argument,
    add_out_argument,
    file_stem,
    run_facts,
    write_results,
)
from benchmarks.reports.rounds_report import Verdict, disturbed, goals_table

_BROKERS: dict[str, type[Broker]] = {"penstock": PenstockBroker, "kafka": KafkaBroker}

C = TypeVar("C")
P = TypeVar("P")


def parse(program: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--broker", choices=list(_BROKERS), default="penstock", help="what holds the topics")
    parser.add_argument(
        "--smoke", action="store_true", help="little data, once: whether it runs, not how fast"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="contest or pattern; repeatable")
    add_out_argument(parser)
    add_json_argument(parser)
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data is meanwhile")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each contender takes a turn")
    parser.add_argument("--list", action="store_true", help="print the contests' names")
    return parser.parse_args()


def open_console(width: int) -> Console:
    """`width` is for output that goes to a file, where tables need not be narrow."""
    # SIGTERM then ends the run as Ctrl-C does: with a report of what was measured, and without child processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Console(width=None if sys.stdout.isatty() else width)


def chosen(options: argparse.Namespace, contests: Iterable[C], smoke: Sequence[str]) -> list[C]:
    patterns = options.only or (smoke if options.smoke else ["*"])
    found = [each for each in contests if any(fnmatch(each.name, pattern) for pattern in patterns)]  # type: ignore[attr-defined]
    if not found:
        sys.exit(f"no contest is called {' or '.join(patterns)}; --list shows their names")
    return found


def open_broker(options: argparse.Namespace, folder: Path) -> Broker:
    if options.broker == "kafka":
        try:
            fetch_kafka()
        except PeerUnavailable as reason:
            sys.exit(f"Apache Kafka cannot be had here: {reason}")
    return _BROKERS[options.broker](folder / options.broker)


def chosen_pace(options: argparse.Namespace, smoke: P, full: P) -> P:
    pace = smoke if options.smoke else full
    return replace(pace, rounds=options.rounds) if options.rounds else pace  # type: ignore[type-var]


def facts(
    options: argparse.Namespace, suite: str, broker: Broker, folder: Path, rounds: int
) -> dict[str, Any]:
    return {
        **run_facts(suite, folder, rounds),
        "smoke": options.smoke,
        "broker": {"name": broker.name, **broker.settings()},
    }


def print_verdicts(console: Console, verdicts: list[Verdict], results: Sequence[Any]) -> None:
    if verdicts:
        console.print(goals_table(verdicts))
    if names := disturbed((each.contest.name, each) for each in results):
        console.print(
            f"[yellow]Something else kept the machine busy (other_cores): {', '.join(names[:6])}.[/]"
        )


def save(
    console: Console,
    options: argparse.Namespace,
    document: dict[str, Any],
    results: Sequence[Any],
    subject: str,
    save_plot: Callable[[Any, str, Path], None],
) -> int:
    """Write JSON and plot, and print failures; returns the exit code of the command."""
    picture = options.out / f"{file_stem(document)}.png"
    write_results(path := options.json or picture.with_suffix(".json"), document)
    console.print(f"wrote {path}")
    if any(result.rounds for result in results):
        machine, broker = document["machine"], document["broker"]
        topics = f"topics on {broker['name'].capitalize()} {broker['version']}"
        title = f"{subject}, {topics}, {machine['cores']} cores, {machine['cpu']}"
        picture.parent.mkdir(parents=True, exist_ok=True)
        save_plot(results, title, picture)
        console.print(f"wrote {picture}")
    failures = [each for each in results if each.failure is not None]
    for each in failures:
        console.print(f"[red]{each.contest.name} failed:[/] {escape(each.failure or '')}", highlight=False)
    return 1 if failures or not results else 0
