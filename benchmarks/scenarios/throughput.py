"""Throughput: batches of at most 64 KB, produced and consumed at the same time by several processes."""

from dataclasses import replace

from benchmarks.load.workload import Client, Workload, records_per_batch
from benchmarks.scenarios.scenario import Scenario, flat_out_or_paced
from penstock.protocol.compression import Codec

_SIZES = {"100B": 100, "1KB": 1024}
_SHOWN = ("records_per_s", "consumed_records_per_s", "mb_per_s", "cpu_s_per_gb")
_OFFERED_RECORDS_PER_S = 1_000_000


def _scenario(client: Client, size: str, codec: Codec) -> Scenario:
    short = "raw" if client is Client.RAW else "librdkafka"
    workload = Workload(value_bytes=_SIZES[size], client=client, codec=codec)
    return Scenario(
        name=f"{short}-{size}-{codec.name.lower()}",
        title=f"{client.value}, {size}, {codec.name.lower()}",
        measure=flat_out_or_paced(workload),
        shown=_SHOWN,
        quick=(size, codec) == ("100B", Codec.NONE),
        rounds_max=99 if client is Client.RAW else 1,
    )


def _offered() -> Scenario:
    workload = Workload(value_bytes=100)
    rate = _OFFERED_RECORDS_PER_S / records_per_batch(workload)
    return Scenario(
        name="offered-1M",
        title="1 M/s of 100 B offered",
        measure=flat_out_or_paced(replace(workload, rate=rate)),
        shown=(
            "records_per_s",
            "consumed_records_per_s",
            "cpu_s_per_gb",
            "produce_p99_ms",
            "end_to_end_p99_ms",
        ),
        quick=True,
    )


def _synced() -> Scenario:
    return Scenario(
        name="fsync-1KB",
        title="raw frames, 1KB, synced",
        measure=flat_out_or_paced(Workload(value_bytes=1024, fsync=True)),
        shown=_SHOWN,
    )


SCENARIOS = (
    *(_scenario(Client.RAW, size, codec) for size in _SIZES for codec in Codec),
    _offered(),
    *(_scenario(Client.LIBRDKAFKA, size, codec) for size in _SIZES for codec in Codec),
    _synced(),
)
