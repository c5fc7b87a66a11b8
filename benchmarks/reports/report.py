"""The results for people (tables) and for programs (one JSON document)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from benchmarks.reports.goals import Figures, Verdict
from benchmarks.reports.metrics import METRICS, Metric
from benchmarks.reports.stats import ratio
from benchmarks.run import Result

#: Kernel threads that write back pages take some; what is beyond this is a neighbour.
OTHER_CORES_MAX = 0.3


class Beside(NamedTuple):
    """A peer's figure; the ratio is ours divided by it."""

    value: float | None
    ratio: float | None
    worst: float | None = None


class Row(NamedTuple):
    """One metric of one scenario, and what each peer has beside it."""

    title: str
    metric: Metric
    ours: float | None
    ours_worst: float | None
    peers: tuple[Beside, ...]


def figures_of(results: Iterable[Result], brokers: Sequence[str]) -> Figures:
    results = list(results)
    return {broker: {r.scenario.name: r.median(broker) for r in results} for broker in brokers}


def ratio_rows(results: Iterable[Result], ours: str, peers: Sequence[str]) -> list[Row]:
    return [
        _row(result, name, ours, peers)
        for result in results
        for name in result.scenario.shown
        if any(name in result.median(broker) for broker in (ours, *peers))
    ]


def _row(result: Result, name: str, ours: str, peers: Sequence[str]) -> Row:
    mine = result.median(ours).get(name)
    beside = []
    for peer in peers:
        theirs = result.median(peer).get(name)
        beside.append(Beside(theirs, ratio(mine, theirs), result.worst(peer).get(name)))
    return Row(result.scenario.title, METRICS[name], mine, result.worst(ours).get(name), tuple(beside))


def disturbed(results: Iterable[Result]) -> list[str]:
    """Rounds in which something else had a good part of a core: "kafka in unbatched"."""
    return [
        f"{broker} in {result.scenario.name}"
        for result in results
        for broker, rounds in result.rounds.items()
        if any(metrics.get("other_cores", 0) > OTHER_CORES_MAX for metrics in rounds)
    ]


def results_table(rows: Sequence[Row], ours: str, peers: Sequence[str]) -> Table:
    table = Table(
        title=f"{ours} / {', '.join(peers)}, medians over all rounds (worst)"
        if peers
        else "Medians over all rounds (worst)",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("scenario", style="cyan")
    table.add_column("metric")
    table.add_column(ours, justify="right")
    for peer in peers:
        table.add_column(peer, justify="right")
        table.add_column("ratio", justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row.title):
            table.add_section()
        cells: list[str | Text] = [row.title if row.title != previous else "", row.metric.label]
        cells.append(_figure_text(row.metric, row.ours, row.ours_worst))
        for beside in row.peers:
            cells += (_figure_text(row.metric, beside.value, beside.worst), _ratio_text(row.metric, beside))
        table.add_row(*cells)
        previous = row.title
    return table


def _figure_text(metric: Metric, value: float | None, worst: float | None) -> str:
    """The worst of several rounds behind their median, where they are not the same."""
    text, worst_text = metric.text(value), metric.text(worst)
    return text if worst is None or worst_text == text else f"{text} ({worst_text})"


def _ratio_text(metric: Metric, beside: Beside) -> Text:
    if beside.ratio is None:
        return Text("-")
    return Text(f"{beside.ratio:.2f}x", style="green" if metric.is_win(beside.ratio) else "red")


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
        "goals": goal_documents(verdicts),
        "results": [_scenario_document(result, brokers) for result in results],
    }


def goal_documents(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {"goal": v.goal.text, "value": v.value, "bound": v.goal.bound, "reached": v.reached} for v in verdicts
    ]


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
    ours, *peers = brokers
    document["ratio"] = {
        peer: {name: ratio(value, medians[peer].get(name)) for name, value in medians[ours].items()}
        for peer in peers
        if medians[peer]
    }
    return document
