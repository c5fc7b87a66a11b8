"""Latency at a rate that does not depend on the broker: the same for both, or half of what each can take."""

from dataclasses import replace

from benchmarks.load.workload import Workload
from benchmarks.measure import Metrics, run_workload
from benchmarks.scenarios.scenario import Measure, Scenario, Site, flat_out_or_paced

_SHOWN = ("requests_per_s", "produce_p50_ms", "produce_p99_ms", "produce_p999_ms", "end_to_end_p99_ms")
_FIXED_RATE = 2000.0
_FIXED_SYNCED_RATE = 200.0

_BATCHED = Workload(value_bytes=100)
_UNBATCHED = Workload(value_bytes=1024, batched=False, consumers=1, connections=8)


def _at_half(workload: Workload) -> Measure:
    def measure(site: Site) -> Metrics:
        """Saturate first; the figures are those of the second run."""
        saturation = run_workload(site.broker, workload, site.pace.timing)["requests_per_s"]
        metrics = run_workload(site.broker, replace(workload, rate=saturation / 2), site.pace.timing)
        return {**metrics, "saturation_requests_per_s": saturation}

    return measure


SCENARIOS = (
    Scenario(
        name="latency-fixed",
        title=f"{_FIXED_RATE:,.0f} x 1 KB/s",
        measure=flat_out_or_paced(replace(_UNBATCHED, rate=_FIXED_RATE)),
        shown=(*_SHOWN, "cpu_us_per_request"),
    ),
    Scenario(
        name="latency-half-unbatched",
        title="half load, single 1 KB",
        measure=_at_half(_UNBATCHED),
        shown=_SHOWN,
    ),
    Scenario(
        name="latency-half-batched",
        title="half load, 64 KB batches",
        measure=_at_half(_BATCHED),
        shown=_SHOWN,
        quick=True,
    ),
    Scenario(
        name="latency-fsync",
        title=f"{_FIXED_SYNCED_RATE:,.0f} x 1 KB/s, synced",
        measure=flat_out_or_paced(replace(_UNBATCHED, rate=_FIXED_SYNCED_RATE, fsync=True)),
        shown=_SHOWN,
    ),
)
