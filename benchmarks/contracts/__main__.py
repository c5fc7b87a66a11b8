"""python -m benchmarks.contracts [--broker NAME] [--smoke] [--only NAME] [--json FILE] [--list]: cost of contracts."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.servers import ServerMissing

from benchmarks import contest_command
from benchmarks.brokers.broker import Broker
from benchmarks.contracts.contests import CONTESTS, SMOKE, Contest, Result, messages_of, turns_of
from benchmarks.contracts.messages import Kind
from benchmarks.contracts.metrics import verdicts
from benchmarks.contracts.plot import save_plot
from benchmarks.contracts.report import json_document, results_table
from benchmarks.contracts.stage import FULL, PARTITIONS, PUBLISHED, Pace, Stage, TurnFailed
from benchmarks.contracts.stage import SMOKE as SMOKE_PACE
from benchmarks.rounds import take_turns
from benchmarks.spark.stage import connect
from benchmarks.wire.raw_client import BrokerError
from penstock.client.errors import ClientError

_WIDTH = 150


def main() -> int:
    options = contest_command.parse("python -m benchmarks.contracts", __doc__)
    if options.list:
        print(*(contest.name for contest in CONTESTS), sep="\n")
        return 0
    console = contest_command.open_console(_WIDTH)
    contests = contest_command.chosen(options, CONTESTS, SMOKE)
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.data_dir) as folder,
        contest_command.open_broker(options, Path(folder)) as broker,
    ):
        facts = _facts(options, broker, Path(folder))
        stage = _stage(options, contests, broker, Path(folder))
        try:
            _hold_all(console, contests, stage, results)
        except KeyboardInterrupt:
            console.print("[yellow]interrupted; what was measured so far follows[/]")
        finally:
            stage.close()
            stage.cluster.close()
    return _report(console, options, results, facts)


def _stage(options: argparse.Namespace, contests: list[Contest], broker: Broker, folder: Path) -> Stage:
    broker.start()
    pace = _pace(options)
    filled: dict[Kind, int] = {}
    for each in contests:
        if each.speed != PUBLISHED:
            most = max(messages_of(pace, each, who) for who in each.contenders)
            filled[each.kind] = max(filled.get(each.kind, 0), most)
    return Stage(broker=broker, cluster=connect(broker), folder=folder, pace=pace, filled=filled)


def _pace(options: argparse.Namespace) -> Pace:
    return contest_command.chosen_pace(options, SMOKE_PACE, FULL)


def _hold_all(console: Console, contests: list[Contest], stage: Stage, results: list[Result]) -> None:
    began = time.monotonic()
    for contest in contests:
        results.append(result := Result(contest=contest))
        for step in _steps(contest, stage, result):
            console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {contest.title}: {step}")


def _steps(contest: Contest, stage: Stage, result: Result) -> Iterator[str]:
    """A failure becomes part of the result, and the next contest is still held."""
    if contest.speed != PUBLISHED:
        yield "fill the topic"
        stage.topic_of(contest.kind)
    try:
        yield from take_turns(turns_of(contest, stage), result, warm_ups=0, rounds=stage.pace.rounds)
    except (TurnFailed, ServerMissing, BrokerError, ClientError, OSError) as error:
        result.failure = f"{type(error).__name__}: {error}"


def _facts(options: argparse.Namespace, broker: Broker, folder: Path) -> dict[str, Any]:
    pace = _pace(options)
    return {
        **contest_command.facts(options, "contracts", broker, folder, pace.rounds),
        "load": {
            "partitions": PARTITIONS,
            "messages": {
                speed: count if isinstance(count, int) else {kind.name: each for kind, each in count.items()}
                for speed, count in pace.messages.items()
            },
            "warm_part": pace.warm_part,
        },
    }


def _report(
    console: Console, options: argparse.Namespace, results: list[Result], facts: dict[str, Any]
) -> int:
    console.print(results_table(results))
    contest_command.print_verdicts(console, [] if options.smoke else verdicts(results), results)
    document = json_document(results, facts)
    return contest_command.save(console, options, document, results, "Delivery contracts", save_plot)


if __name__ == "__main__":
    sys.exit(main())
