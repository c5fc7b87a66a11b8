"""python -m benchmarks [--cluster | --queue | --secure | --neighbours] [--peer NAME] [--quick]: the broker."""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks import suites
from benchmarks.brokers.broker import Subject
from benchmarks.brokers.kafka import PeerUnavailable, fetch_kafka
from benchmarks.brokers.nats import find_nats
from benchmarks.load.processes import WorkerFailed
from benchmarks.load.workload import BATCH_BYTES_MAX, LAG_BYTES_MAX, WINDOW
from benchmarks.reports.goals import check_goals
from benchmarks.reports.plot import save_plot
from benchmarks.reports.report import (
    disturbed,
    figures_of,
    goals_table,
    json_document,
    ratio_rows,
    results_table,
)
from benchmarks.reports.results_file import (
    add_json_argument,
    add_out_argument,
    file_stem,
    run_facts,
    write_results,
)
from benchmarks.run import Result, Step, quick_only, run_scenarios
from benchmarks.scenarios.scenario import Pace, Scenario
from benchmarks.suites import Suite
from benchmarks.wire.raw_client import BrokerError

#: By name: what it is called, and how to come by it and its version.
_PEERS = {"kafka": ("Apache Kafka", fetch_kafka), "nats": ("nats-server", find_nats)}


def main() -> int:
    options = _parse()
    # SIGTERM ends the run as Ctrl-C does: with a report of what was measured, and without brokers left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    suite = _suite(options)
    if options.list:
        print(*(scenario.name for scenario in suite.scenarios), sep="\n")
        return 0
    scenarios = _chosen(suite, options)
    kinds = [suite.ours, *_available(console, suite, options.peer)]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.data_dir) as folder:
        facts = _facts(suite, options, kinds, Path(folder))
        steps = run_scenarios(scenarios, kinds, _pace(suite, options), suite.warm_up, Path(folder), results)
        _run(console, steps)
    return _report(console, options, [kind.name for kind in kinds], results, facts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--peer",
        choices=list(_PEERS),
        action="append",
        default=[],
        help="run it beside Penstock; repeatable (nats only with --queue)",
    )
    suite = parser.add_mutually_exclusive_group()
    suite.add_argument(
        "--cluster", action="store_true", help="three nodes of each, replicated; fail-over too"
    )
    suite.add_argument("--secure", action="store_true", help="what TLS, logins, access rules and quotas cost")
    suite.add_argument(
        "--neighbours", action="store_true", help="a steady producer beside a noisy one with quotas"
    )
    suite.add_argument(
        "--queue", action="store_true", help="transactions, rebalances, acknowledgements of share groups"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first look in about a minute, at clusters in about three"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="scenario name or pattern; repeatable"
    )
    add_out_argument(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where the brokers keep their data meanwhile"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios' names")
    return parser.parse_args()


def _suite(options: argparse.Namespace) -> Suite:
    for is_wanted, suite in (
        (options.cluster, suites.cluster),
        (options.queue, suites.queue),
        (options.secure, suites.secure),
        (options.neighbours, suites.neighbours),
    ):
        if is_wanted:
            return suite()
    return suites.single()


def _available(console: Console, suite: Suite, names: Iterable[str]) -> list[type[Subject]]:
    """The peers that can be had here; what cannot is left out with a message."""
    kinds = []
    for name in dict.fromkeys(names):
        title, find = _PEERS[name]
        try:
            if name not in suite.peers:
                raise PeerUnavailable("it has nothing of what is measured here")
            console.print(f"{title} {find()} runs beside Penstock")
            kinds.append(suite.peers[name])
        except PeerUnavailable as reason:
            console.print(f"[yellow]{title} is left out: {reason}[/]")
    return kinds


def _chosen(suite: Suite, options: argparse.Namespace) -> list[Scenario]:
    if options.only:
        chosen = [s for s in suite.scenarios if any(fnmatch(s.name, pattern) for pattern in options.only)]
    else:
        chosen = quick_only(suite.scenarios) if options.quick else list(suite.scenarios)
    if not chosen:
        sys.exit(f"no scenario is called {' or '.join(options.only)}; --list shows their names")
    return chosen


def _run(console: Console, steps: Iterable[Step]) -> None:
    began = time.monotonic()
    try:
        for step in steps:
            console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {step.broker:9} {step.what}")
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; what was measured so far follows[/]")
    except (BrokerError, WorkerFailed) as error:
        # Scenarios keep their own failures, so this one is a broker that does not even warm up.
        sys.exit(f"cannot measure: {error}")


def _pace(suite: Suite, options: argparse.Namespace) -> Pace:
    return suite.quick if options.quick else suite.full


def _facts(
    suite: Suite, options: argparse.Namespace, kinds: list[type[Subject]], folder: Path
) -> dict[str, Any]:
    return {
        **run_facts(suite.name, folder, _pace(suite, options).rounds),
        "quick": options.quick,
        "load": {
            "acks": "all",
            "batch_bytes_max": BATCH_BYTES_MAX,
            "requests_in_flight": WINDOW,
            "lag_bytes_max": LAG_BYTES_MAX,
            "pace": asdict(_pace(suite, options)),
        },
        "brokers": {kind.name: kind(folder / kind.name).settings() for kind in kinds},
    }


def _report(
    console: Console,
    options: argparse.Namespace,
    brokers: list[str],
    results: list[Result],
    facts: dict[str, Any],
) -> int:
    ours, *peers = brokers
    figures = figures_of(results, brokers)
    verdicts = check_goals(figures, ours, "kafka" if "kafka" in peers else None)
    console.print(results_table(ratio_rows(results, ours, peers), ours, peers))
    if verdicts:
        console.print(goals_table(verdicts))
    if names := disturbed(results):
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        console.print(f"[yellow]Something else kept the machine busy (other_cores): {shown}.[/]")
    _save(console, options, json_document(results, brokers, verdicts, facts), figures, brokers)
    return _report_failures(console, results)


def _save(
    console: Console, options: argparse.Namespace, document: dict[str, Any], figures: Any, brokers: list[str]
) -> None:
    picture = options.out / f"{file_stem(document)}.png"
    write_results(path := options.json or picture.with_suffix(".json"), document)
    console.print(f"wrote {path}")
    if any(figures[broker].values() for broker in brokers):
        machine = document["machine"]
        title = " and ".join(
            f"{name.capitalize()} {document['brokers'][name]['version']}" for name in brokers
        )
        if document["suite"] == "cluster":
            title += ", three nodes each,"
        picture.parent.mkdir(parents=True, exist_ok=True)
        save_plot(figures, brokers, f"{title} on {machine['cores']} cores, {machine['cpu']}", picture)
        console.print(f"wrote {picture}")


def _report_failures(console: Console, results: list[Result]) -> int:
    failures = [(result.scenario.name, *item) for result in results for item in result.failures.items()]
    for scenario, broker, reason in failures:
        console.print(f"[red]{broker} failed {scenario}:[/] {escape(reason)}", highlight=False)
    return 1 if failures or not results else 0


if __name__ == "__main__":
    sys.exit(main())
