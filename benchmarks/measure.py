"""One run: a topic, clients at work, a window in which they and the broker are watched, contents verified."""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.brokers import procfs
from benchmarks.brokers.broker import Subject
from benchmarks.load.processes import Counters, Job, LoadProcesses, Phase
from benchmarks.load.verify import verify_topic
from benchmarks.load.workload import Load, Workload, build_load
from benchmarks.reports.stats import latency_summary
from benchmarks.wire.raw_client import BrokerError, Shape, Topic, create_topic, delete_topic

_topic_numbers = itertools.count(1)
#: How many times its duration a warm-up may take to reach its amount.
_PATIENCE = 6

Metrics = dict[str, float]


class Timing(NamedTuple):
    ramp_s: float
    measure_s: float


class WarmUp(NamedTuple):
    """At least this long, and at least this much: bytes of a batched load, requests of an unbatched one."""

    duration_s: float
    size_bytes: int
    requests: int


class Window(NamedTuple):
    """What happened while measuring; CPU time of the broker, of its clients, and of the whole machine."""

    wall_s: float
    broker_cpu_s: float
    clients_cpu_s: float
    machine_cpu_s: float
    produced: Counters
    consumed: Counters


class Run(NamedTuple):
    """What its processes handed back, besides."""

    window: Window
    produced: Sequence[Any]
    consumed: Sequence[Any]


def run_workload(broker: Subject, workload: Workload, timing: Timing) -> Metrics:
    """Run, verify, clean up."""
    # Pages that earlier runs left dirty are written back now and not in the middle of this one.
    os.sync()
    with temporary_topic(broker, workload.partitions, fsync=workload.fsync) as topic:
        load = build_load(workload, topic)
        run = run_jobs(broker, load.producers, load.consumers, timing)
        stored_bytes_per_record = _verify(workload, topic, load, run)
    return {
        **throughput_metrics(run.window, stored_bytes_per_record, batched=workload.batched),
        **_latency_metrics(run),
    }


def warm_up(broker: Subject, workload: Workload, amount: WarmUp) -> None:
    """The same load with nothing kept: it is only to make the broker hot.

    A just-in-time compiler counts calls and not seconds, so on a busy machine this takes longer.
    """
    with temporary_topic(broker, workload.partitions, fsync=workload.fsync) as topic:
        load = build_load(workload, topic)
        with LoadProcesses(load.producers, load.consumers) as processes:
            processes.enter(Phase.RUN, amount.duration_s)
            deadline = time.monotonic() + _PATIENCE * amount.duration_s
            while not _is_warm(processes, workload, amount) and time.monotonic() < deadline:
                processes.enter(Phase.RUN, 0.2)


def _is_warm(processes: LoadProcesses, workload: Workload, amount: WarmUp) -> bool:
    produced = processes.produced()
    if workload.batched:
        return produced.records * workload.value_bytes >= amount.size_bytes
    return produced.requests >= amount.requests


def next_topic_name() -> str:
    return f"bench-{next(_topic_numbers):03}"


@contextmanager
def temporary_topic(broker: Subject, partitions: int, *, fsync: bool) -> Iterator[Topic]:
    name = next_topic_name()
    shape = Shape(partitions, broker.replication_factor)
    with broker.connect() as admin:
        topic = create_topic(admin, name, shape, broker.topic_configs(fsync=fsync))
        try:
            yield topic
        finally:
            delete_topic(admin, name)


def run_jobs(broker: Subject, producers: Sequence[Job], consumers: Sequence[Job], timing: Timing) -> Run:
    with LoadProcesses(producers, consumers) as processes:
        processes.enter(Phase.RUN, timing.ramp_s)
        before = _sample(broker, processes)
        processes.enter(Phase.MEASURE, timing.measure_s)
        after = _sample(broker, processes)
        return Run(_between(before, after), *processes.finish())


def _sample(broker: Subject, processes: LoadProcesses) -> Window:
    return Window(
        wall_s=time.monotonic(),
        broker_cpu_s=broker.cpu_seconds(),
        clients_cpu_s=processes.cpu_seconds(),
        machine_cpu_s=procfs.machine_cpu_seconds(),
        produced=processes.produced(),
        consumed=processes.consumed(),
    )


def _between(before: Window, after: Window) -> Window:
    return Window(
        wall_s=after.wall_s - before.wall_s,
        broker_cpu_s=after.broker_cpu_s - before.broker_cpu_s,
        clients_cpu_s=after.clients_cpu_s - before.clients_cpu_s,
        machine_cpu_s=after.machine_cpu_s - before.machine_cpu_s,
        produced=after.produced.since(before.produced),
        consumed=after.consumed.since(before.consumed),
    )


def _verify(workload: Workload, topic: Topic, load: Load, run: Run) -> float:
    """Everything acknowledged was consumed, and is stored as sent. Returns the stored bytes per record."""
    acknowledged: int = sum(result.records for result in run.produced)
    read = sum(result.records for result in run.consumed)
    if workload.consumers and read != acknowledged:
        raise BrokerError(f"{topic.name}: {acknowledged} records acknowledged, {read} consumed")
    if not acknowledged:
        raise BrokerError(f"{topic.name}: not one record was acknowledged")
    return verify_topic(topic, acknowledged, load.check) / acknowledged


def throughput_metrics(window: Window, bytes_per_record: float, *, batched: bool) -> Metrics:
    """Rates and costs. Bytes are those of the batches on the wire, in plus out."""
    moved_bytes = (window.produced.records + window.consumed.records) * bytes_per_record
    metrics = {
        "records_per_s": window.produced.records / window.wall_s,
        "mb_per_s": window.produced.records * bytes_per_record / window.wall_s / 1e6,
        **occupied_cores(window),
    }
    if window.consumed.records:
        metrics["consumed_records_per_s"] = window.consumed.records / window.wall_s
    if window.produced.requests:
        metrics["requests_per_s"] = window.produced.requests / window.wall_s
    if batched and moved_bytes:
        metrics["cpu_s_per_gb"] = window.broker_cpu_s / (moved_bytes / 1e9)
    if not batched and window.produced.requests:
        served = window.produced.requests + window.consumed.requests
        metrics["cpu_us_per_request"] = window.broker_cpu_s / served * 1e6
    return metrics


def occupied_cores(window: Window) -> Metrics:
    """Who kept the machine busy. A third party that did makes the run doubtful."""
    other_cpu_s = window.machine_cpu_s - window.broker_cpu_s - window.clients_cpu_s
    return {
        "broker_cores": window.broker_cpu_s / window.wall_s,
        "client_cores": window.clients_cpu_s / window.wall_s,
        "other_cores": max(other_cpu_s, 0) / window.wall_s,
    }


def _latency_metrics(run: Run) -> Metrics:
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
