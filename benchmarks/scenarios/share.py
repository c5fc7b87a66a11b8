"""A work queue: what share groups and JetStream consumers can acknowledge a second, an outcome drawn for each record.

The records are there before. Members take up to 500 at once and say of each whether it is accepted, released (it comes
again) or rejected; what they said counts when it is answered, which is when it is stored. Nothing is buried in a
dead-letter topic, as the peers have none.
"""

import os
import time
from dataclasses import dataclass

from benchmarks.brokers.broker import Subject
from benchmarks.brokers.nats import NatsServer
from benchmarks.load.acknowledgements import Mix, check_once, final_count
from benchmarks.load.nats import NatsConnection, NatsPlan, create_consumer, create_stream, fill_stream, pull
from benchmarks.load.processes import Job
from benchmarks.load.share import RECORDS_MAX, Joined, SharePlan, fill, join, leave, work
from benchmarks.measure import (
    Metrics,
    Run,
    Timing,
    next_topic_name,
    occupied_cores,
    run_jobs,
    temporary_topic,
)
from benchmarks.scenarios.scenario import Measure, Pace, Scenario
from benchmarks.wire.admin import Coordinated, Resource, alter_configs, await_coordinator
from benchmarks.wire.payloads import fill_batch, value_pool
from benchmarks.wire.raw_client import BrokerError, Topic
from penstock.protocol.compression import Codec

_STATE_TOPIC = "__share_group_state"
_VALUE_BYTES = 100
#: What producers batch by default.
_BATCH_BYTES = 16 * 1024
#: More than any of them works off a second; JetStream takes a while to take them in.
_RECORDS_PER_S = 800_000
_ACCEPTED_PER_S = 2_600_000
_MESSAGES_PER_S = 400_000
_MIXED = Mix(released=10, rejected=10)
_ACCEPTED = Mix(released=0, rejected=0)
_CONSUMER = "workers"
_SETTLE_S = 10.0
#: Near the end consumers wait for records, which is not what is measured.
_WORKED_OFF_MAX = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    consumers: int = 4
    partitions: int = 4
    mix: Mix = _MIXED
    fsync: bool = False
    piggybacks: bool = True
    #: How many are there for each second.
    records_per_s: int = _RECORDS_PER_S


def _measured(wanted: Work) -> Measure:
    return lambda site: _run(site.broker, wanted, site.pace.timing)


def _run(broker: Subject, wanted: Work, timing: Timing) -> Metrics:
    whole_s = timing.ramp_s + timing.measure_s
    if isinstance(broker, NatsServer):
        return _run_nats(broker, wanted, timing, int(_MESSAGES_PER_S * whole_s))
    records = int(wanted.records_per_s * whole_s)
    batch, batch_records = fill_batch(
        value_pool(_VALUE_BYTES), Codec.NONE, _BATCH_BYTES, int(time.time() * 1000)
    )
    # What is synced or not is the state; the records are there before.
    with temporary_topic(broker, wanted.partitions, fsync=False) as topic:
        ends = fill(topic, batch, batch_records, records)
        joined = _prepare(broker, topic, wanted)
        os.sync()
        run = run_jobs(broker, (), _jobs(topic, wanted, joined), timing)
        _verify(run, ends)
        with broker.connect() as admin:
            leave(admin, _group(topic), joined)
    return _metrics(run)


def _group(topic: Topic) -> str:
    return f"{topic.name}-workers"


def _prepare(broker: Subject, topic: Topic, wanted: Work) -> list[Joined]:
    group = _group(topic)
    with broker.connect() as admin:
        await_coordinator(admin, Coordinated.GROUP, group)
        alter_configs(admin, Resource.GROUP, group, {"share.auto.offset.reset": "earliest"})
        if broker.name == "penstock":
            alter_configs(admin, Resource.GROUP, group, {"errors.deadletterqueue.topic.name": ""})
        joined = join(admin, group, topic, wanted.consumers, wanted.partitions)
        alter_configs(admin, Resource.TOPIC, _STATE_TOPIC, broker.flush_config(fsync=wanted.fsync))
    return joined


def _jobs(topic: Topic, wanted: Work, joined: list[Joined]) -> list[Job]:
    ((address, _),) = topic.leaders.items()
    return [
        Job(
            work,
            (
                SharePlan(
                    address=address,
                    group=_group(topic),
                    topic=topic,
                    joined=member,
                    mix=wanted.mix,
                    seed=seed,
                    piggybacks=wanted.piggybacks,
                ),
            ),
        )
        for seed, member in enumerate(joined)
    ]


def _verify(run: Run, ends: dict[int, int]) -> None:
    """No record that was accepted or rejected came again, and there was always something to do."""
    said = [one for worked in run.consumed for one in worked.said]
    done = check_once(said, ends)
    if done != sum(final_count(types) for _, _, types in said):
        raise BrokerError("records were acknowledged that were never there")
    _check_supply(done, sum(ends.values()))


def _check_supply(done: int, records: int) -> None:
    if done > _WORKED_OFF_MAX * records:
        raise BrokerError(f"{done} of {records} records were worked off: too few to measure")


def _run_nats(broker: NatsServer, wanted: Work, timing: Timing, records: int) -> Metrics:
    stream = next_topic_name()
    broker.connect().socket.close()
    admin = NatsConnection(broker.address)
    create_stream(admin, stream)
    fill_stream(admin, stream, value_pool(_VALUE_BYTES), records)
    create_consumer(admin, stream, _CONSUMER, 2 * wanted.consumers * RECORDS_MAX)
    os.sync()
    jobs = [
        Job(
            pull,
            (
                NatsPlan(
                    address=broker.address,
                    stream=stream,
                    consumer=_CONSUMER,
                    mix=wanted.mix,
                    seed=seed,
                    messages_max=RECORDS_MAX,
                ),
            ),
        )
        for seed in range(wanted.consumers)
    ]
    run = run_jobs(broker, (), jobs, timing)
    _verify_nats(admin, stream, records, sum(worked.final for worked in run.consumed))
    admin.call(f"STREAM.DELETE.{stream}", {})
    return _metrics(run)


def _verify_nats(admin: NatsConnection, stream: str, records: int, final: int) -> None:
    """The records that are still to be handed out or acknowledged are those that were neither accepted nor rejected."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        info = admin.call(f"CONSUMER.INFO.{stream}.{_CONSUMER}", {})
        held = admin.call(f"STREAM.INFO.{stream}", {})["state"]["messages"]
        done = held - info["num_pending"] - info["num_ack_pending"]
        if done == final:
            return _check_supply(done, records)
        if time.monotonic() > deadline:
            raise BrokerError(
                f"{stream}: {final} of {held} messages were accepted or rejected, it says {done}"
            )
        time.sleep(0.05)


def _metrics(run: Run) -> Metrics:
    window = run.window
    if not window.consumed.records:
        raise BrokerError("nothing was acknowledged")
    return {
        "acks_per_s": window.consumed.records / window.wall_s,
        "cpu_us_per_ack": window.broker_cpu_s / window.consumed.records * 1e6,
        "share_requests_per_s": window.consumed.requests / window.wall_s,
        **occupied_cores(window),
    }


def warm_up(broker: Subject, pace: Pace) -> None:
    _run(broker, Work(), Timing(pace.warm_up.duration_s, 0.5))


def _scenario(name: str, title: str, wanted: Work, *, nats: bool = True, quick: bool = False) -> Scenario:
    return Scenario(
        name=f"share-{name}",
        title=f"acknowledge, {title}",
        measure=_measured(wanted),
        shown=("acks_per_s", "cpu_us_per_ack"),
        quick=quick,
        warm_up=warm_up,
        runs_on=("penstock", "kafka", "nats") if nats else ("penstock", "kafka"),
    )


SCENARIOS = (
    _scenario("ack-4c", "4 consumers", Work(), quick=True),
    _scenario("ack-1c", "1 consumer", Work(consumers=1)),
    _scenario(
        "ack-4c-accepted", "4 consumers, all accepted", Work(mix=_ACCEPTED, records_per_s=_ACCEPTED_PER_S)
    ),
    _scenario("ack-4c-1p", "4 consumers, 1 partition", Work(partitions=1), nats=False),
    _scenario("ack-4c-apart", "4 consumers, requests of their own", Work(piggybacks=False), nats=False),
    _scenario("ack-4c-synced", "4 consumers, synced", Work(fsync=True), nats=False, quick=True),
    _scenario("ack-1c-synced", "1 consumer, synced", Work(consumers=1, fsync=True), nats=False),
)
