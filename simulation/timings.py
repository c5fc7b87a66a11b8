"""How long everything waits, in simulated milliseconds. Short against the faults, so that little time holds much."""

from typing import NamedTuple

from penstock.raft.types import Timings


class WorldTimings(NamedTuple):
    raft: Timings = Timings(
        election_timeout_ms=150, fetch_timeout_ms=250, backoff_max_ms=100, fetch_wait_ms=120, retry_ms=30
    )
    request_ms: int = 200
    heartbeat_ms: int = 80
    session_ms: int = 320
    lag_ms_max: int = 200
    fetch_wait_ms: int = 120
    #: How often a broker looks after its in-sync sets.
    care_ms: int = 60
    #: How often it writes its high watermarks down.
    checkpoint_ms: int = 400
    backoff_ms: int = 25


SMALL = WorldTimings()
#: The defaults of the product, for a world that measures fail-over as a user would see it.
DEFAULT = WorldTimings(
    raft=Timings(
        election_timeout_ms=1_000,
        fetch_timeout_ms=1_500,
        backoff_max_ms=1_000,
        fetch_wait_ms=500,
        retry_ms=50,
    ),
    request_ms=2_000,
    heartbeat_ms=500,
    session_ms=3_000,
    lag_ms_max=10_000,
    fetch_wait_ms=500,
    care_ms=500,
    checkpoint_ms=5_000,
    backoff_ms=200,
)
