"""python -m benchmarks.spark [--broker NAME] [--smoke] [--only NAME] [--json FILE] [--list]: Spark side by side."""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import contest_command
from benchmarks.brokers.broker import Broker
from benchmarks.brokers.kafka import PeerUnavailable
from benchmarks.spark.connector import Connector, fetch_connector
from benchmarks.spark.contest import Contest, Result, WrongRows, hold
from benchmarks.spark.contests import CONTESTS, SMOKE
from benchmarks.spark.drivers import SETTINGS, Driver, DriverFailed
from benchmarks.spark.metrics import scalings, verdicts
from benchmarks.spark.plot import save_plot
from benchmarks.spark.report import json_document, results_table, scaling_lines
from benchmarks.spark.rows import BATCH_BYTES_MAX, KEY_BYTES
from benchmarks.spark.stage import FULL, PARTITIONS, Pace, Stage, connect
from benchmarks.spark.stage import SMOKE as SMOKE_PACE
from benchmarks.wire.raw_client import BrokerError
from penstock.client.errors import ClientError

_WIDTH = 140


def main() -> int:
    options = contest_command.parse("python -m benchmarks.spark", __doc__)
    if options.list:
        print(*(contest.name for contest in CONTESTS), sep="\n")
        return 0
    console = contest_command.open_console(_WIDTH)
    contests = sorted(contest_command.chosen(options, CONTESTS, SMOKE), key=lambda contest: -contest.cores)
    connector = _connector(console)
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.data_dir) as folder,
        contest_command.open_broker(options, Path(folder)) as broker,
    ):
        facts = _facts(options, broker, connector, Path(folder))
        stage = _stage(options, broker, connector, Path(folder))
        try:
            _hold_all(console, contests, stage, connector, results)
        except KeyboardInterrupt:
            console.print("[yellow]interrupted; what was measured so far follows[/]")
        stage.cluster.close()
    return _report(console, options, results, facts)


def _connector(console: Console) -> Connector | None:
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    scala_version = next(jars.glob("spark-core_*.jar")).name.split("_")[1].split("-")[0]
    try:
        found = fetch_connector(pyspark.__version__, scala_version)
    except PeerUnavailable as reason:
        console.print(f"[yellow]Spark's own connector is left out: {reason}[/]")
        return None
    console.print(f"Spark {pyspark.__version__} with its own connector: {found}")
    return found


def _stage(options: argparse.Namespace, broker: Broker, connector: Connector | None, folder: Path) -> Stage:
    broker.start()
    pace = _pace(options)
    return Stage(
        broker=broker, cluster=connect(broker), folder=folder, pace=pace, has_connector=connector is not None
    )


def _pace(options: argparse.Namespace) -> Pace:
    return contest_command.chosen_pace(options, SMOKE_PACE, FULL)


def _hold_all(
    console: Console,
    contests: list[Contest],
    stage: Stage,
    connector: Connector | None,
    results: list[Result],
) -> None:
    """One session after the other, so that none runs beside the one that is measured."""
    began = time.monotonic()
    for cores, those in itertools.groupby(contests, key=lambda contest: contest.cores):
        jars = connector.jars if connector is not None else ()
        with Driver(cores=cores, tasks=PARTITIONS, jars=jars, folder=stage.folder) as driver:
            for contest in those:
                results.append(result := Result(contest=contest))
                for step in _steps(contest, stage, driver, result):
                    console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {contest.title}: {step}")


def _steps(contest: Contest, stage: Stage, driver: Driver, result: Result) -> Iterator[str]:
    """A failure becomes part of the result, and the next contest is still held."""
    try:
        yield from hold(contest, stage, driver, result)
    except (WrongRows, DriverFailed, BrokerError, ClientError, OSError) as error:
        result.failure = f"{type(error).__name__}: {error}"


def _facts(
    options: argparse.Namespace, broker: Broker, connector: Connector | None, folder: Path
) -> dict[str, Any]:
    import pyspark

    pace = _pace(options)
    return {
        **contest_command.facts(options, "spark", broker, folder, pace.rounds),
        "spark": {"version": pyspark.__version__, "settings": SETTINGS},
        "connector": connector.versions if connector is not None else None,
        "load": {
            "partitions_and_tasks": PARTITIONS,
            "key_bytes": KEY_BYTES,
            "batch_bytes_max": BATCH_BYTES_MAX,
            "pace": asdict(pace),
        },
    }


def _report(
    console: Console, options: argparse.Namespace, results: list[Result], facts: dict[str, Any]
) -> int:
    console.print(results_table(results))
    for line in scaling_lines(scalings(results)):
        console.print(line)
    contest_command.print_verdicts(console, [] if options.smoke else verdicts(results), results)
    document = json_document(results, facts)
    subject = f"Spark {document['spark']['version']}"
    return contest_command.save(console, options, document, results, subject, save_plot)


if __name__ == "__main__":
    sys.exit(main())
