"""One run: a topic, clients at work, a window in which they and the broker are watched, contents verified."""

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.brokers import Broker
from benchmarks.crew import Counters, Crew, Phase
from benchmarks.outcome import Consumed, Produced
from benchmarks.raw_client import BrokerError, Topic, create_topic, delete_topic
from benchmarks.stats import latency_summary
from benchmarks.verify import verify_topic
from benchmarks.workload import Load, Workload, build_load

_topic_numbers = itertools.count(1)

Metrics = dict[str, float]


class Timing(NamedTuple):
    ramp_s: float
    measure_s: float


class Window(NamedTuple):
    """What happened while measuring."""

    wall_s: float
    cpu_s: float
    produced: Counters
    consumed: Counters


class _Run(NamedTuple):
    window: Window
    produced: Sequence[Produced]
    consumed: Sequence[Consumed]


def run_workload(broker: Broker, workload: Workload, timing: Timing) -> Metrics:
    """Run, verify, clean up."""
    # Pages that earlier runs left dirty are written back now and not in the middle of this one.
    os.sync()
    name = f"bench-{next(_topic_numbers):03}"
    with broker.connect() as admin:
        topic_id = create_topic(admin, name, workload.partitions, broker.topic_configs(fsync=workload.fsync))
        topic = Topic(broker.address, name, topic_id)
        try:
            load = build_load(workload, topic)
            run = _measure(broker, load, timing)
            stored_bytes_per_record = _verify(workload, topic, load, run)
        finally:
            delete_topic(admin, name)
    return {
        **throughput_metrics(run.window, stored_bytes_per_record, batched=workload.batched),
        **_latency_metrics(run),
    }


def _measure(broker: Broker, load: Load, timing: Timing) -> _Run:
    with Crew(load.producers, load.consumers) as crew:
        crew.enter(Phase.RUN, timing.ramp_s)
        before = _sample(broker, crew)
        crew.enter(Phase.MEASURE, timing.measure_s)
        after = _sample(broker, crew)
        window = Window(
            after.wall_s - before.wall_s,
            after.cpu_s - before.cpu_s,
            after.produced.since(before.produced),
            after.consumed.since(before.consumed),
        )
        return _Run(window, *crew.finish())


def _sample(broker: Broker, crew: Crew) -> Window:
    return Window(time.monotonic(), broker.cpu_seconds(), crew.produced(), crew.consumed())


def _verify(workload: Workload, topic: Topic, load: Load, run: _Run) -> float:
    """Everything acknowledged was consumed, and is stored as sent. Returns the stored bytes per record."""
    acknowledged = sum(result.records for result in run.produced)
    read = sum(result.records for result in run.consumed)
    if workload.consumers and read != acknowledged:
        raise BrokerError(f"{topic.name}: {acknowledged} records acknowledged, {read} consumed")
    if not acknowledged:
        raise BrokerError(f"{topic.name}: not one record was acknowledged")
    return verify_topic(topic, workload.partitions, acknowledged, load.check) / acknowledged


def throughput_metrics(window: Window, bytes_per_record: float, *, batched: bool) -> Metrics:
    """Rates and costs. Bytes are those of the batches on the wire, in plus out."""
    moved_bytes = (window.produced.records + window.consumed.records) * bytes_per_record
    metrics = {
        "records_per_s": window.produced.records / window.wall_s,
        "mb_per_s": window.produced.records * bytes_per_record / window.wall_s / 1e6,
    }
    if window.consumed.records:
        metrics["consumed_records_per_s"] = window.consumed.records / window.wall_s
    if window.produced.requests:
        metrics["requests_per_s"] = window.produced.requests / window.wall_s
    if batched and moved_bytes:
        metrics["cpu_s_per_gb"] = window.cpu_s / (moved_bytes / 1e9)
    if not batched and window.produced.requests:
        served = window.produced.requests + window.consumed.requests
        metrics["cpu_us_per_request"] = window.cpu_s / served * 1e6
    return metrics


def _latency_metrics(run: _Run) -> Metrics:
    latencies = itertools.chain.from_iterable(result.latencies_ns for result in run.produced)
    due = {batch: at for result in run.produced for batch, at in result.due.by_offset().items()}
    arrivals = itertools.chain.from_iterable(result.arrivals.by_offset().items() for result in run.consumed)
    return {
        **latency_summary(latencies, "produce"),
        **latency_summary(end_to_end(due, arrivals), "end_to_end"),
    }


def end_to_end(
    due_ns: dict[tuple[int, int], int], arrivals: Iterable[tuple[tuple[int, int], int]]
) -> Iterable[int]:
    """From the moment a batch was due to be sent to the moment a consumer had it."""
    return (arrived_ns - due_ns[batch] for batch, arrived_ns in arrivals if batch in due_ns)
