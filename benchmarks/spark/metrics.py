"""What is measured of Spark: one declaration per figure, which the table and the plot read."""

from typing import NamedTuple

from benchmarks.reports.metrics import Metric
from benchmarks.reports.rounds_report import Goal, Verdict
from benchmarks.spark.contest import CONNECTOR, OURS, Result

METRICS = {
    each.name: each
    for each in (
        Metric(name="rows_per_s", label="rows/s", higher_is_better=True, decimals=0),
        Metric(name="cpu_s_per_million", label="CPU-s per million rows", higher_is_better=False, decimals=2),
        Metric(name="trigger_p50_ms", label="trigger p50 ms", higher_is_better=False, decimals=0),
        Metric(name="trigger_p90_ms", label="trigger p90 ms", higher_is_better=False, decimals=0),
        Metric(name="cpu_ms_per_batch", label="CPU-ms per batch", higher_is_better=False, decimals=0),
    )
}
#: By contender: what people read.
TITLES = {
    "penstock": "Penstock",
    "penstock-narrow": "Penstock, 2 columns",
    "penstock-pipeline": "Penstock, as in pipelines",
    "penstock-exactly-once": "Penstock, exactly once",
    "connector": "Spark's connector",
    "parquet": "Parquet",
    "nowhere": "no sink",
}


GOALS = tuple(
    Goal(f"100 B, {codec}: rows/s at least twice the connector's", f"read-100B-{codec}", "rows_per_s", 2)
    for codec in ("none", "lz4", "zstd")
)


class Scaling(NamedTuple):
    """How much faster it goes on two cores than on one."""

    contest: str
    contender: str
    factor: float


def verdicts(results: list[Result]) -> list[Verdict]:
    by_name = {each.contest.name: each for each in results}
    found = []
    for goal in GOALS:
        result = by_name.get(goal.contest)
        spread = result.ratio(CONNECTOR, goal.metric, OURS) if result is not None else None
        if spread is not None:
            found.append(Verdict(goal, spread.median))
    return found


def scalings(results: list[Result]) -> list[Scaling]:
    by_name = {each.contest.name: each for each in results}
    found = []
    for name, result in by_name.items():
        alone = by_name.get(f"{name}-1-core")
        for contender in result.contest.contenders if alone is not None else ():
            assert alone is not None
            both = [each.spread(contender, "rows_per_s") for each in (result, alone)]
            if both[0] is not None and both[1] is not None:
                found.append(Scaling(name, contender, both[0].median / both[1].median))
    return found
