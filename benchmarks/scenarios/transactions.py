"""Transactions, one after the other by several producers, beside the same batches produced without one.

A round is one request with a batch for each partition; in a transaction EndTxn follows. Ending a transaction writes a
marker to every partition and two records to the transaction's own log, so small transactions are the dear ones.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.brokers.broker import Subject
from benchmarks.load.processes import Job
from benchmarks.load.raw import SessionReader
from benchmarks.load.transactions import Protocol, TransactionPlan, transact
from benchmarks.measure import Metrics, Run, Timing, occupied_cores, run_jobs, temporary_topic
from benchmarks.reports.stats import latency_summary
from benchmarks.scenarios.scenario import Measure, Pace, Scenario, Site
from benchmarks.wire.admin import Coordinated, Resource, alter_configs, await_coordinator
from benchmarks.wire.payloads import value_pool
from benchmarks.wire.raw_client import BrokerError, Connection, Topic, end_offsets
from penstock.protocol.record_batch import read_header

_STATE_TOPIC = "__transaction_state"
_VALUE_BYTES = 100
_PROCESSES = 2
_PRODUCERS_EACH = 4
_SETTLE_S = 30.0
_SHOWN = (
    "txn_per_s",
    "txn_records_per_s",
    "txn_p99_ms",
    "cpu_us_per_txn",
    "txn_rate_of_plain",
    "txn_cpu_over_plain",
)


class Shape(NamedTuple):
    records: int
    partitions: int
    protocol: Protocol = Protocol.NEWER
    fsync: bool = False


def _measured(shape: Shape) -> Measure:
    def measure(site: Site) -> Metrics:
        plain = _run(site.broker, shape._replace(protocol=Protocol.NONE), site.pace.timing)
        metrics = _run(site.broker, shape, site.pace.timing)
        return {
            **_named(plain, "plain"),
            **_named(metrics, "txn"),
            "txn_rate_of_plain": metrics["per_s"] / plain["per_s"],
            "txn_cpu_over_plain": metrics["cpu_us"] / plain["cpu_us"],
            "other_cores": max(plain["other_cores"], metrics["other_cores"]),
        }

    return measure


def _named(metrics: Metrics, kind: str) -> Metrics:
    return {
        f"{kind}_per_s": metrics["per_s"],
        f"{kind}_records_per_s": metrics["records_per_s"],
        f"{kind}_p50_ms": metrics["p50_ms"],
        f"{kind}_p99_ms": metrics["p99_ms"],
        f"cpu_us_per_{kind}": metrics["cpu_us"],
        f"{kind}_retries_per_round": metrics["retries"],
    }


def _run(broker: Subject, shape: Shape, timing: Timing) -> Metrics:
    os.sync()
    if shape.protocol is not Protocol.NONE:
        _set_flush(broker, fsync=shape.fsync)
    with temporary_topic(broker, shape.partitions, fsync=shape.fsync) as topic:
        run = run_jobs(broker, _jobs(topic, shape), (), timing)
        _verify(topic, shape, sum(ended.rounds for ended in run.produced))
    return _metrics(run)


def _set_flush(broker: Subject, *, fsync: bool) -> None:
    """The log of transactions is as durable as the topic."""
    with broker.connect() as admin:
        await_coordinator(admin, Coordinated.TRANSACTION, "any")
        configs = broker.flush_config(fsync=fsync)
        if configs:
            alter_configs(admin, Resource.TOPIC, _STATE_TOPIC, configs)


def _jobs(topic: Topic, shape: Shape) -> list[Job]:
    ((address, partitions),) = topic.leaders.items()
    return [
        Job(
            transact,
            (
                TransactionPlan(
                    address=address,
                    topic=topic.name,
                    partitions=partitions,
                    values=value_pool(_VALUE_BYTES, shape.records),
                    protocol=shape.protocol,
                    connections=_PRODUCERS_EACH,
                    name=str(process),
                ),
            ),
        )
        for process in range(_PROCESSES)
    ]


def _metrics(run: Run) -> Metrics:
    window = run.window
    rounds = window.produced.requests
    if not rounds:
        raise BrokerError("not one transaction ended")
    latencies_ns = [ns for ended in run.produced for ns in ended.latencies_ns]
    summary = latency_summary(latencies_ns, "round")
    return {
        "per_s": rounds / window.wall_s,
        "records_per_s": window.produced.records / window.wall_s,
        "cpu_us": window.broker_cpu_s / rounds * 1e6,
        "p50_ms": summary["round_p50_ms"],
        "p99_ms": summary["round_p99_ms"],
        "retries": sum(ended.retries for ended in run.produced) / sum(ended.rounds for ended in run.produced),
        **occupied_cores(window),
    }


def _verify(topic: Topic, shape: Shape, rounds: int) -> None:
    """Nothing is left open, and the topic holds what was acknowledged: all batches, and a marker behind each."""
    ((address, partitions),) = topic.leaders.items()
    with Connection(address) as connection:
        end = _settled_end(connection, topic, partitions)
        reader = SessionReader(connection, topic.id, partitions)
        markers = 0
        while reader.records < end:
            if not reader.fetch():
                raise BrokerError(f"{topic.name} ends after {reader.records} of {end} records")
            markers += sum(read_header(batch).is_control for batch in reader.batches)
    expected = rounds * len(partitions) * shape.records
    if reader.records - markers != expected:
        raise BrokerError(
            f"{topic.name} holds {reader.records - markers} records, {expected} were acknowledged"
        )
    if shape.protocol is not Protocol.NONE and markers != rounds * len(partitions):
        raise BrokerError(f"{topic.name} holds {markers} markers after {rounds} transactions")


def _settled_end(connection: Connection, topic: Topic, partitions: Sequence[int]) -> int:
    """EndTxn is answered when the outcome is decided; the markers follow."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        stable = end_offsets(connection, topic.name, partitions, committed_only=True)
        if stable == end_offsets(connection, topic.name, partitions):
            return sum(stable)
        if time.monotonic() > deadline:
            raise BrokerError(f"{topic.name}: a transaction is still open")
        time.sleep(0.01)


def warm_up(broker: Subject, pace: Pace) -> None:
    for protocol in (Protocol.NONE, Protocol.OLDER, Protocol.NEWER):
        _run(broker, Shape(10, 3, protocol), Timing(pace.warm_up.duration_s, 0.5))


def _scenario(name: str, shape: Shape, *, title: str = "", quick: bool = False) -> Scenario:
    where = "1 partition" if shape.partitions == 1 else f"each of {shape.partitions} partitions"
    return Scenario(
        name=f"txn-{name}",
        title=f"transactions, {shape.records} x 100 B to {where}{title}",
        measure=_measured(shape),
        shown=_SHOWN,
        quick=quick,
        warm_up=warm_up,
    )


SCENARIOS = (
    *(
        _scenario(
            f"{records}r-{partitions}p", Shape(records, partitions), quick=(records, partitions) == (10, 3)
        )
        for partitions in (1, 3)
        for records in (1, 10, 100)
    ),
    _scenario("10r-3p-older", Shape(10, 3, Protocol.OLDER), title=", older protocol"),
    _scenario("10r-3p-synced", Shape(10, 3, fsync=True), title=", synced"),
)
