"""The results for people (tables) and for programs (one JSON document)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from benchmarks.goals import Figures, Verdict
from benchmarks.metrics import METRICS, Metric
from benchmarks.run import Result
from benchmarks.stats import ratio

#: Kernel threads that write back pages take some; what is beyond this is a neighbour.
OTHER_CORES_MAX = 0.3


class Row(NamedTuple):
    """One metric of one scenario; the ratio is ours divided by the peer's."""

    title: str
    metric: Metric
    ours: float | None
    peer: float | None
    ratio: float | None
    ours_worst: float | None = None
    peer_worst: float | None = None


def figures_of(results: Iterable[Result], brokers: Sequence[str]) -> Figures:
    results = list(results)
    return {broker: {r.scenario.name: r.median(broker) for r in results} for broker in brokers}


def ratio_rows(results: Iterable[Result], ours: str, peer: str | None) -> list[Row]:
    rows = []
    for result in results:
        mine, theirs = result.median(ours), result.median(peer) if peer else {}
        my_worst, their_worst = result.worst(ours), result.worst(peer) if peer else {}
        for name in result.scenario.shown:
            if name in mine or name in theirs:
                a, b = mine.get(name), theirs.get(name)
                worst = my_worst.get(name), their_worst.get(name)
                rows.append(Row(result.scenario.title, METRICS[name], a, b, ratio(a, b), *worst))
    return rows


def disturbed(results: Iterable[Result]) -> list[str]:
    """Rounds in which something else had a good part of a core: "kafka in unbatched"."""
    return [
        f"{broker} in {result.scenario.name}"
        for result in results
        for broker, rounds in result.rounds.items()
        if any(metrics.get("other_cores", 0) > OTHER_CORES_MAX for metrics in rounds)
    ]


def results_table(rows: Sequence[Row], ours: str, peer: str | None) -> Table:
    table = Table(
        title=f"{ours} / {peer}, medians over all rounds (worst)"
        if peer
        else "Medians over all rounds (worst)",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("scenario", style="cyan")
    table.add_column("metric")
    table.add_column(ours, justify="right")
    if peer:
        table.add_column(peer, justify="right")
        table.add_column("ratio", justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row.title):
            table.add_section()
        cells: list[str | Text] = [row.title if row.title != previous else "", row.metric.label]
        cells.append(_figure_text(row.metric, row.ours, row.ours_worst))
        if peer:
            cells += (_figure_text(row.metric, row.peer, row.peer_worst), _ratio_text(row))
        table.add_row(*cells)
        previous = row.title
    return table


def _figure_text(metric: Metric, value: float | None, worst: float | None) -> str:
    """The worst of several rounds behind their median, where they are not the same."""
    text, worst_text = metric.text(value), metric.text(worst)
    return text if worst is None or worst_text == text else f"{text} ({worst_text})"


def _ratio_text(row: Row) -> Text:
    if row.ratio is None:
        return Text("-")
    return Text(f"{row.ratio:.2f}x", style="green" if row.metric.is_win(row.ratio) else "red")


def goals_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Goals", title_justify="left", header_style="bold")
    table.add_column("goal")
    table.add_column("measured", justify="right")
    table.add_column("")
    for verdict in verdicts:
        mark = Text("reached", style="green") if verdict.reached else Text("missed", style="red")
        table.add_row(verdict.goal.text, _goal_value(verdict), mark)
    return table


def _goal_value(verdict: Verdict) -> str:
    if verdict.goal.against_peer:
        return f"{verdict.value:.2f}x"
    return METRICS[verdict.goal.metric].text(verdict.value)


def json_document(
    results: Sequence[Result], brokers: Sequence[str], verdicts: Sequence[Verdict], facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        **facts,
        "goals": [
            {"goal": v.goal.text, "value": v.value, "bound": v.goal.bound, "reached": v.reached}
            for v in verdicts
        ],
        "scenarios": [_scenario_document(result, brokers) for result in results],
    }


def _scenario_document(result: Result, brokers: Sequence[str]) -> dict[str, Any]:
    medians = {broker: result.median(broker) for broker in brokers}
    document: dict[str, Any] = {
        "name": result.scenario.name,
        "title": result.scenario.title,
        "median": medians,
        "worst": {broker: result.worst(broker) for broker in brokers},
        "rounds": result.rounds,
    }
    if result.failures:
        document["failures"] = result.failures
    if len(brokers) == 2:
        ours, peer = brokers
        document["ratio"] = {
            name: ratio(value, medians[peer].get(name)) for name, value in medians[ours].items()
        }
    return document
