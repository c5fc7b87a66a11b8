"""From exec to the first acknowledged record, and what a broker with nothing to do occupies."""

import time

from benchmarks.brokers.broker import Subject
from benchmarks.measure import Metrics
from benchmarks.reports.stats import median_metrics
from benchmarks.scenarios.scenario import Scenario, Site
from benchmarks.wire.frames import Ack, ack_struct, produce_frame
from benchmarks.wire.payloads import single_record_batch
from benchmarks.wire.raw_client import BrokerError, wait_for_topic

_TOPIC = "first"
_SETTLE_S = 2.0
#: UNKNOWN_TOPIC_OR_PARTITION and NOT_LEADER_OR_FOLLOWER: metadata may run ahead of the partition.
_RETRIABLE = frozenset((3, 6))


def _measure(site: Site) -> Metrics:
    return median_metrics([_start_once(site) for _ in range(site.pace.starts)])


def _start_once(site: Site) -> Metrics:
    frame = produce_frame(_TOPIC, 0, single_record_batch(b"hello", int(time.time() * 1000)))
    with site.fresh() as broker:
        began = time.monotonic()
        broker.start()
        _produce_first(broker, frame)
        start_to_ack_s = time.monotonic() - began
        start_cpu_s = broker.cpu_seconds()
        time.sleep(_SETTLE_S)
        rss, pss = broker.memory_bytes()
    return {
        "start_to_ack_s": start_to_ack_s,
        "start_cpu_s": start_cpu_s,
        "idle_rss_mb": rss / 1e6,
        "idle_pss_mb": pss / 1e6,
    }


def _produce_first(broker: Subject, frame: bytes) -> None:
    """As an ordinary client does it: the topic comes into being by asking for it, and early errors are retried."""
    layout = ack_struct(_TOPIC)
    with broker.connect() as connection:
        wait_for_topic(connection, _TOPIC, auto_create=True)
        while True:
            connection.send(frame)
            response = bytes(connection.read_frame())
            if len(response) + 4 < layout.size:
                raise BrokerError(f"{broker.name} answered the first record with {response!r}")
            # A refusal may name the leader behind the code, which makes the answer longer.
            error_code = Ack._make(layout.unpack_from(b"\0\0\0\0" + response)).error_code
            if not error_code:
                return
            if error_code not in _RETRIABLE:
                raise BrokerError(f"{broker.name} refused the first record: error code {error_code}")


SCENARIOS = (
    Scenario(
        name="start",
        title="start on an empty folder",
        measure=_measure,
        shown=("start_to_ack_s", "start_cpu_s", "idle_rss_mb", "idle_pss_mb"),
        quick=True,
        rounds_max=1,
    ),
)
