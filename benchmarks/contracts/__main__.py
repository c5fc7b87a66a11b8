"""python -m benchmarks.contracts [--broker NAME] [--smoke] [--only NAME] [--out DIR] [--list]: what contracts cost."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from tests.servers import ServerMissing

from benchmarks.brokers import Broker, PenstockBroker
from benchmarks.contracts.contests import CONTESTS, SMOKE, Contest, Result, messages_of, turns_of
from benchmarks.contracts.messages import Kind
from benchmarks.contracts.metrics import verdicts
from benchmarks.contracts.plot import save_plot
from benchmarks.contracts.report import json_document, results_table
from benchmarks.contracts.stage import FULL, PARTITIONS, PUBLISHED, Pace, Stage, TurnFailed
from benchmarks.contracts.stage import SMOKE as SMOKE_PACE
from benchmarks.machine import machine_facts
from benchmarks.peer_kafka import KafkaBroker, PeerUnavailable, fetch_kafka
from benchmarks.raw_client import BrokerError
from benchmarks.rounds import take_turns
from benchmarks.rounds_report import disturbed, goals_table
from benchmarks.spark.stage import connect
from penstock.client.errors import ClientError

_RESULTS = Path(__file__).parent.parent / "results"
#: Where nobody sees it at once, tables need not be squeezed.
_WIDTH = 150
_BROKERS: dict[str, type[Broker]] = {"penstock": PenstockBroker, "kafka": KafkaBroker}


def main() -> int:
    options = _parse()
    if options.list:
        print(*(contest.name for contest in CONTESTS), sep="\n")
        return 0
    # Whoever ends the run from outside gets what was measured so far, and leaves no process behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    contests = _chosen(options)
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.data_dir) as folder,
        _broker(options, Path(folder)) as broker,
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contracts", description=__doc__)
    parser.add_argument("--broker", choices=list(_BROKERS), default="penstock", help="what holds the topics")
    parser.add_argument(
        "--smoke", action="store_true", help="few messages, once: whether it runs, not how fast"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="contest or pattern; repeatable")
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR", help="folder for JSON and PNG")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where topics and databases are meanwhile"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="how often everybody takes a turn")
    parser.add_argument("--list", action="store_true", help="print the contests' names")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Contest]:
    patterns = options.only or (SMOKE if options.smoke else ["*"])
    chosen = [each for each in CONTESTS if any(fnmatch(each.name, pattern) for pattern in patterns)]
    if not chosen:
        sys.exit(f"no contest is called {' or '.join(patterns)}; --list shows their names")
    return chosen


def _broker(options: argparse.Namespace, folder: Path) -> Broker:
    if options.broker == "kafka":
        try:
            fetch_kafka()
        except PeerUnavailable as reason:
            sys.exit(f"Apache Kafka cannot be had here: {reason}")
    return _BROKERS[options.broker](folder / options.broker)


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
    pace = SMOKE_PACE if options.smoke else FULL
    return replace(pace, rounds=options.rounds) if options.rounds else pace


def _hold_all(console: Console, contests: list[Contest], stage: Stage, results: list[Result]) -> None:
    began = time.monotonic()
    for contest in contests:
        results.append(result := Result(contest=contest))
        for step in _steps(contest, stage, result):
            console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {contest.title}: {step}")


def _steps(contest: Contest, stage: Stage, result: Result) -> Iterator[str]:
    """What goes wrong is kept, and the next contest is held all the same."""
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
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "suite": "contracts",
        "smoke": options.smoke,
        "load": {
            "partitions": PARTITIONS,
            "messages": {
                speed: count if isinstance(count, int) else {kind.name: each for kind, each in count.items()}
                for speed, count in pace.messages.items()
            },
            "rounds": pace.rounds,
            "warm_part": pace.warm_part,
        },
        "machine": machine_facts(folder),
        "broker": {"name": broker.name, **broker.settings()},
    }


def _report(
    console: Console, options: argparse.Namespace, results: list[Result], facts: dict[str, Any]
) -> int:
    console.print(results_table(results))
    if (found := verdicts(results)) and not options.smoke:
        console.print(goals_table(found))
    if names := disturbed((each.contest.name, each) for each in results):
        console.print(
            f"[yellow]Something else kept the machine busy (other_cores): {', '.join(names[:6])}.[/]"
        )
    _save(console, options.out, json_document(results, facts), results)
    failures = [each for each in results if each.failure is not None]
    for each in failures:
        console.print(f"[red]{each.contest.name} failed:[/] {escape(each.failure or '')}", highlight=False)
    return 1 if failures or not results else 0


def _save(console: Console, out: Path, document: dict[str, Any], results: list[Result]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{document['when'].replace(':', '').replace('+0000', 'Z')}-contracts"
    (out / f"{stem}.json").write_text(json.dumps(document, indent=2) + "\n")
    console.print(f"wrote {out / f'{stem}.json'}")
    if any(result.rounds for result in results):
        machine = document["machine"]
        broker = f"{document['broker']['name'].capitalize()} {document['broker']['version']}"
        title = f"Delivery contracts, topics on {broker}, {machine['cores']} cores, {machine['cpu']}"
        save_plot(results, title, out / f"{stem}.png")
        console.print(f"wrote {out / f'{stem}.png'}")


if __name__ == "__main__":
    sys.exit(main())
