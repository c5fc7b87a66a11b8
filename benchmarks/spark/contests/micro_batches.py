"""Small micro-batches: how long a trigger takes, as Spark tells it, with the checkpoint on the local disk.

Checkpoints are written as Spark does by default, and once more as pipelines of Penstock have them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from benchmarks.measure import Metrics
from benchmarks.reports.stats import median, percentile
from benchmarks.spark.contest import CONNECTOR, OURS, Contest, Round, Turn, WrongRows
from benchmarks.spark.contests.writes import EXACTLY_ONCE
from benchmarks.spark.drivers import Driver
from benchmarks.spark.rows import count_committed, fill
from benchmarks.spark.stage import Stage
from penstock.protocol.compression import Codec

_VALUE_BYTES = 100
_SHOWN = ("trigger_p50_ms", "trigger_p90_ms", "cpu_ms_per_batch")

#: With the checkpoints that pipelines have.
PIPELINE = "penstock-pipeline"

Sink = dict[str, Any]


@contextmanager
def _prepared(to_topic: bool, stage: Stage, driver: Driver) -> Iterator[list[Turn]]:
    pace = stage.pace
    rows = (pace.batches + pace.batches_left_out) * pace.batch_rows
    with stage.topic() as topic:
        fill(stage.cluster, topic, rows, _VALUE_BYTES, Codec.NONE)
        options = {
            "kafka.bootstrap.servers": stage.bootstrap,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(pace.batch_rows),
        }
        yield [
            Turn(who, partial(_take, stage, driver, rows, options, who, *pair))
            for who, pair in _pairs(stage, to_topic).items()
        ]


def _pairs(stage: Stage, to_topic: bool) -> dict[str, tuple[str, Sink]]:
    """Source and sink of each."""
    nowhere: Sink = {"sink": "noop", "sink_options": {}}
    servers = {"kafka.bootstrap.servers": stage.bootstrap}
    once: Sink = {"sink": "penstock", "sink_options": {**servers, "contract": "exactly-once"}}
    ours: Sink = {"sink": "penstock", "sink_options": servers} if to_topic else nowhere
    pairs = {OURS: ("penstock", ours), PIPELINE: ("penstock", ours)}
    if to_topic:
        pairs[EXACTLY_ONCE] = ("penstock", once)
    if stage.has_connector:
        pairs[CONNECTOR] = ("kafka", {"sink": "kafka", "sink_options": servers} if to_topic else nowhere)
    return pairs


def _take(
    stage: Stage, driver: Driver, rows: int, options: dict[str, str], who: str, source: str, sink: Sink
) -> Round:
    with ExitStack() as stack:
        target = stack.enter_context(stage.topic()) if sink["sink"] != "noop" else None
        sink_options = {**sink["sink_options"], **({"topic": target} if target else {})}
        answer, spent = driver.watch(
            stage.broker,
            "stream",
            source=source,
            source_options=options,
            sink=sink["sink"],
            sink_options=sink_options,
            checkpoint=str(stage.fresh_folder()),
            without_processes=who == PIPELINE,
        )
        told = answer["batches"]
        written = rows if target is None else count_committed(stage.cluster, target)
    seen = sum(each["rows"] for each in told)
    if (seen, written) != (rows, rows):
        raise WrongRows(f"{source} has read {seen} rows and written {written} of {rows}")
    cpu_s = spent.spark_s + spent.broker_s
    metrics = _durations([each["ms"] for each in told[stage.pace.batches_left_out :]])
    metrics |= {"cpu_ms_per_batch": cpu_s * 1000 / len(told), "other_cores": spent.other_cores}
    return Round(metrics, rows)


def _durations(told: list[dict[str, float]]) -> Metrics:
    """Of whole triggers, and the median of each of their parts."""
    ordered = sorted(each["triggerExecution"] for each in told)
    parts = dict.fromkeys(name for each in told for name in each if name != "triggerExecution")
    return {
        "trigger_p50_ms": median(ordered),
        "trigger_p90_ms": percentile(ordered, 90),
        **{f"{name}_p50_ms": median([each.get(name, 0) for each in told]) for name in parts},
    }


def _contest(name: str, title: str, contenders: tuple[str, ...], *, to_topic: bool) -> Contest:
    return Contest(
        name=name,
        title=title,
        cores=2,
        contenders=contenders,
        shown=_SHOWN,
        prepare=partial(_prepared, to_topic),
    )


CONTESTS = (
    _contest(
        "batches-to-nowhere", "Batches of 1,000 rows, read only", (OURS, PIPELINE, CONNECTOR), to_topic=False
    ),
    _contest(
        "batches-to-topic",
        "Batches of 1,000 rows, topic to topic",
        (OURS, PIPELINE, EXACTLY_ONCE, CONNECTOR),
        to_topic=True,
    ),
)
