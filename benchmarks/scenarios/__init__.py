"""Everything that is measured, in the order of the report."""

from benchmarks.scenarios import latency, startup, throughput, unbatched
from benchmarks.scenarios.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *startup.SCENARIOS,
    *throughput.SCENARIOS,
    *unbatched.SCENARIOS,
    *latency.SCENARIOS,
)
