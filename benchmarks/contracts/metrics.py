"""What is measured of applications: one declaration per figure, and the goals."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contracts.contests import CONTESTS, Result
from benchmarks.reports.metrics import Metric
from benchmarks.reports.rounds_report import Goal, Verdict

METRICS = {
    each.name: each
    for each in (
        Metric(name="messages_per_s", label="messages/s", higher_is_better=True, decimals=0),
        Metric(name="cpu_s_per_million", label="CPU-s per million", higher_is_better=False, decimals=2),
    )
}
#: By contender: what people read.
TITLES = {who.name: who.title for contest in reversed(CONTESTS) for who in contest.contenders}


class _Wanted(NamedTuple):
    goal: Goal
    ours: str
    beside: str


def _at_least_once(contest: str, title: str, ours: str, beside: str, what: str) -> _Wanted:
    text = f"{title}, {what}: messages/s at least 0.8 of the loop by hand"
    return _Wanted(Goal(text, contest, "messages_per_s", 0.8), ours, beside)


GOALS = tuple(
    wanted
    for contest in CONTESTS
    if contest.name.startswith("least-")
    for wanted in (
        _at_least_once(contest.name, contest.title, "penstock", "bare", "Message"),
        _at_least_once(contest.name, contest.title, "penstock-bytes", "bare-bytes", "bytes"),
    )
)


def verdicts(results: Sequence[Result]) -> list[Verdict]:
    by_name = {each.contest.name: each for each in results}
    found = []
    for goal, ours, beside in GOALS:
        result = by_name.get(goal.contest)
        spread = result.ratio(beside, goal.metric, ours) if result is not None else None
        if spread is not None:
            found.append(Verdict(goal, spread.median))
    return found
