"""A workload as a value: what the clients do, and the jobs and bytes that make them do it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from benchmarks.load.native import NativePlan, consume_native, produce_native
from benchmarks.load.processes import Job
from benchmarks.load.raw import ProducePlan, consume, produce_flat_out, produce_paced
from benchmarks.load.verify import CheckBatch, same_batch, values_from
from benchmarks.wire.payloads import fill_batch, single_record_batch, value_pool
from benchmarks.wire.raw_client import Topic
from penstock.protocol.compression import Codec

BATCH_BYTES_MAX = 64 * 1024
#: As many requests in flight per connection as the standard clients allow themselves.
WINDOW = 5
#: Consumed at the same time means that consumers stay this close behind, so in and out are the same rate.
LAG_BYTES_MAX = 128 * 2**20


class Client(Enum):
    RAW = "raw frames"
    LIBRDKAFKA = "librdkafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`rate` is in produce requests a second over all producers; None means flat out.

    Raw producers and consumers are counted per broker that leads partitions, as each connects to one.
    """

    value_bytes: int
    client: Client = Client.RAW
    codec: Codec = Codec.NONE
    batched: bool = True
    partitions: int = 4
    producers: int = 2
    consumers: int = 2
    connections: int = 1
    rate: float | None = None
    fsync: bool = False


class Load(NamedTuple):
    """The processes of a workload, their bytes encoded, and how to recognise those bytes afterwards."""

    producers: list[Job]
    consumers: list[Job]
    check: CheckBatch


def build_load(workload: Workload, topic: Topic) -> Load:
    pool = value_pool(workload.value_bytes)
    match workload.client:
        case Client.RAW:
            return _raw_load(workload, topic, pool)
        case Client.LIBRDKAFKA:
            return _native_load(workload, topic, pool)


def records_per_batch(workload: Workload) -> int:
    return encode(workload, value_pool(workload.value_bytes))[1]


def encode(workload: Workload, pool: list[bytes]) -> tuple[bytes, int]:
    """The one batch that a raw producer resends, and its record count."""
    now_ms = int(time.time() * 1000)
    if workload.batched:
        return fill_batch(pool, workload.codec, BATCH_BYTES_MAX, now_ms)
    return single_record_batch(pool[0], now_ms), 1


def _raw_load(workload: Workload, topic: Topic, pool: list[bytes]) -> Load:
    batch, records = encode(workload, pool)
    producers: list[Job] = []
    consumers: list[Job] = []
    for leader, partitions in topic.leaders.items():
        plan = ProducePlan(
            address=leader,
            topic=topic.name,
            partitions=partitions,
            batch=batch,
            batch_records=records,
            connections=workload.connections,
            window=WINDOW,
            lag_records_max=_lag_records_max(workload),
            access=topic.access,
        )
        producers += [_raw_producer(workload, plan)] * workload.producers
        consumers += [
            Job(consume, (topic, leader, share, workload.rate is not None))
            for share in _shares(workload, partitions)
        ]
    return Load(producers, consumers, same_batch(batch))


def _raw_producer(workload: Workload, plan: ProducePlan) -> Job:
    if workload.rate is None:
        return Job(produce_flat_out, (plan,))
    part = len(plan.partitions) / workload.partitions / workload.producers
    return Job(produce_paced, (plan, workload.rate * part))


def _native_load(workload: Workload, topic: Topic, pool: list[bytes]) -> Load:
    assert workload.rate is None, "librdkafka batches by time, so only raw frames are paced"
    plan = NativePlan(
        bootstrap_servers=topic.bootstrap_servers,
        topic=topic.name,
        partitions=range(workload.partitions),
        pool=pool,
        codec=workload.codec,
        batch_bytes_max=BATCH_BYTES_MAX,
        lag_records_max=_lag_records_max(workload),
        batch_records_max=10_000 if workload.batched else 1,
    )
    shares = _shares(workload, range(workload.partitions))
    consumers = [Job(consume_native, (topic, share)) for share in shares]
    return Load([Job(produce_native, (plan,))] * workload.producers, consumers, values_from(pool))


def _lag_records_max(workload: Workload) -> int | None:
    return LAG_BYTES_MAX // workload.value_bytes if workload.consumers else None


def _shares(workload: Workload, partitions: Sequence[int]) -> list[Sequence[int]]:
    """The partitions divided among the consumers; each gets at least one."""
    shares = [partitions[part :: workload.consumers] for part in range(workload.consumers)]
    return [share for share in shares if share]
