"""Requests of one record each: what a request costs when nothing is shared between records."""

from benchmarks.load.workload import Client, Workload
from benchmarks.scenarios.scenario import Scenario, flat_out_or_paced

_SHOWN = ("requests_per_s", "cpu_us_per_request")

#: Eight connections in each of two processes, five requests in flight on each.
FLAT_OUT = Workload(value_bytes=100, batched=False, consumers=0, connections=8)

SCENARIOS = (
    Scenario(
        name="unbatched",
        title="single 100 B, flat out",
        measure=flat_out_or_paced(FLAT_OUT),
        shown=_SHOWN,
        quick=True,
    ),
    Scenario(
        name="unbatched-librdkafka",
        title="single 100 B, librdkafka",
        measure=flat_out_or_paced(
            Workload(value_bytes=100, batched=False, consumers=0, client=Client.LIBRDKAFKA)
        ),
        shown=_SHOWN,
        rounds_max=1,
    ),
    Scenario(
        name="fsync-unbatched",
        title="single 100 B, synced",
        measure=flat_out_or_paced(
            Workload(value_bytes=100, batched=False, consumers=0, connections=8, fsync=True)
        ),
        shown=_SHOWN,
    ),
)
