"""One picture of a run: rates and costs under each contract, beside the loops that people write by hand."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.contracts.contests import CONTESTS, Contest, Result
from benchmarks.reports.panels import Bar, Look, Panel, save_panels
from benchmarks.rounds import Spread

_BY_HAND, _OURS, _BYTES = "by-hand", "ours", "ours-bytes"
_LOOK = Look(
    titles={_BY_HAND: "confluent-kafka by hand", _OURS: "Penstock", _BYTES: "Penstock, payload only"},
    colours={_BY_HAND: "#b0b7bf", _OURS: "#1b7f79", _BYTES: "#6cc2b8"},
)


class _Point(NamedTuple):
    """A bar: under which label, whose figure of which contest, and how it looks."""

    group: str
    contest: str
    contender: str
    look: str


class _Wanted(NamedTuple):
    title: str
    unit: str
    metric: str
    factor: float
    points: Sequence[_Point]


def save_plot(results: Sequence[Result], title: str, path: Path) -> None:
    by_name = {each.contest.name: each for each in results}
    save_panels([_panel(by_name, wanted) for wanted in _WANTED], _LOOK, title, path)


def _panel(results: dict[str, Result], wanted: _Wanted) -> Panel:
    bars = []
    for point in wanted.points:
        result = results.get(point.contest)
        spread = result.spread(point.contender, wanted.metric) if result is not None else None
        if spread is not None:
            bars.append(Bar(point.group, point.look, Spread(*(each * wanted.factor for each in spread))))
    return Panel(wanted.title, wanted.unit, bars)


def _beginning(prefix: str) -> Iterator[Contest]:
    return (each for each in CONTESTS if each.name.startswith(prefix))


def _by_kind() -> list[_Point]:
    looks = {"bare": _BY_HAND, "penstock": _OURS, "penstock-bytes": _BYTES}
    return [
        _Point(contest.name.removeprefix("least-").replace("-", "\n"), contest.name, who, look)
        for contest in _beginning("least-")
        for who, look in looks.items()
    ]


def _by_shape() -> list[_Point]:
    shown = {
        "json": "dataclass",
        "retries": "retry=",
        "batch": "batch=",
        "threads": "threads",
        "async": "async",
    }
    return [
        point
        for contest in (next(_beginning("least-")), next(_beginning("lanes")))
        for who in contest.contenders
        if who.beside is not None and (name := who.name.removeprefix("penstock-")) in shown
        for point in (
            _Point(shown[name], contest.name, who.beside, _BY_HAND),
            _Point(shown[name], contest.name, who.name, _OURS),
        )
    ]


def _pairs(prefixes: dict[str, str]) -> list[_Point]:
    """Of contests between two."""
    return [
        _Point(label, contest, who, look)
        for contest, label in prefixes.items()
        for ours in next(_beginning(contest)).contenders
        if ours.beside is not None
        for who, look in ((ours.beside, _BY_HAND), (ours.name, _OURS))
    ]


def _by_database(contest: str, label: str, databases: Sequence[str]) -> list[_Point]:
    names = {"sqlite": "SQLite", "redis": "Redis", "postgres": "PostgreSQL"}
    return [_Point(f"{label}{names[each]}", contest, f"penstock-{each}", _OURS) for each in databases]


_THOUSANDS = ("thousand messages/s", "messages_per_s", 1e-3)
_WANTED = (
    _Wanted("At least once", "million messages/s", "messages_per_s", 1e-6, _by_kind()),
    _Wanted(
        "At least once: CPU of the client (lower is better)",
        "CPU-s per million messages",
        "cpu_s_per_million",
        1,
        _by_kind(),
    ),
    _Wanted(
        "At least once, 100 B, by kind of handler", "million messages/s", "messages_per_s", 1e-6, _by_shape()
    ),
    _Wanted(
        "Commits with every batch",
        *_THOUSANDS,
        _pairs({"most": "at most once", "exactly": "exactly once", "exactly-copy": "exactly once,\ncopy"}),
    ),
    _Wanted(
        "Effectively once", *_THOUSANDS, _by_database("effectively", "", ("sqlite", "redis", "postgres"))
    ),
    _Wanted(
        "A database transaction for every message",
        *_THOUSANDS,
        [
            *_by_database("effectively-connection", "effectively\n", ("sqlite", "postgres")),
            *_by_database("exactly-ledger", "ledger\n", ("sqlite", "postgres")),
        ],
    ),
    _Wanted("Publish", *_THOUSANDS, _pairs({"publish-100B": "100 B", "publish-1KB": "1 KB"})),
)
