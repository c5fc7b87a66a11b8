"""The noisy neighbour: a tenant produces at a steady rate, alone and beside another that does one attack at a time.

Both log in as users of their own, and the noisy one has the same quotas on both brokers.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.brokers.broker import Broker
from benchmarks.brokers.security import Security, allow_all_topics, set_quotas
from benchmarks.load.attacks import AttackFailed, Target, attacking
from benchmarks.load.workload import Workload
from benchmarks.measure import Metrics, run_workload, warm_up
from benchmarks.scenarios.scenario import Measure, Pace, Scenario, Site
from benchmarks.wire.access import LOAD, Access
from benchmarks.wire.admin import Coordinated, await_coordinator, create_topics
from benchmarks.wire.raw_client import BrokerError, Connection, Shape, create_topic

NOISY, NOISY_HOST = "noisy", "127.0.0.2"
STEADY_RATE = 500
_STEADY = Workload(
    value_bytes=100, batched=False, partitions=1, producers=1, consumers=0, connections=4, rate=STEADY_RATE
)
_WARM = Workload(value_bytes=100, batched=False, partitions=1, producers=1, consumers=0, connections=4)
#: Bytes per second in and out, and the share of one thread's time, in percent.
QUOTAS = {"producer_byte_rate": 5e6, "consumer_byte_rate": 5e6, "request_percentage": 25.0}
#: Connections per second; those that are to be kept may be opened faster.
_CREATIONS, _CREATIONS_OF_KEPT = 100.0, 5_000.0
_CONNECTIONS = 5_000
_TOPICS = 1_000
_RAMP_S = 1.0
_WATCH_S = 0.1

_TITLES: Mapping[str, str] = {
    "smallest": "smallest requests",
    "largest": "batches of 1 MB",
    "connections": "5,000 connections",
    "metadata": "metadata of 1,000 topics",
    "fetches": "fetches that do not wait",
    "transactions": "transactions left open",
    "rebalances": "endless rebalances",
    "bombs": "decompression bombs",
    "handshakes": "TLS handshakes",
}


def _measure(attack: str) -> Measure:
    security = Security(tls=attack == "handshakes", users=(LOAD, NOISY))

    def measure(site: Site) -> Metrics:
        assert issubclass(site.kind, Broker)
        with (
            TemporaryDirectory(dir=site.folder) as folder,
            site.kind(Path(folder) / "broker", security) as broker,
        ):
            broker.start()
            target = set_up(broker, attack)
            return _beside(broker, attack, target, site.pace)

    return measure


def set_up(broker: Broker, attack: str) -> Target:
    with broker.connect() as admin:
        for user in (LOAD, NOISY):
            allow_all_topics(admin, user)
        set_quotas(admin, "user", NOISY, QUOTAS)
        creations = _CREATIONS_OF_KEPT if attack == "connections" else _CREATIONS
        set_quotas(admin, "ip", NOISY_HOST, {"connection_creation_rate": creations})
        common = broker.topic_configs(fsync=False)
        topic = create_topic(admin, "noisy", Shape(), common)
        compacted = {"cleanup.policy": "compact", "max.message.bytes": str(2**24)}
        create_topic(admin, "noisy-compacted", Shape(), common | compacted)
        if attack == "metadata":
            create_topics(admin, [f"other-{number:04}" for number in range(_TOPICS)])
        _await_coordinators(admin)
        access = admin.access.as_user(NOISY)
    return Target(
        address=broker.address,
        access=Access(certificate=access.certificate, user=access.user, source=NOISY_HOST),
        topic=topic.name,
        topic_id=topic.id,
        compacted="noisy-compacted",
        connections=_CONNECTIONS,
    )


def _await_coordinators(admin: Connection) -> None:
    for kind in (Coordinated.GROUP, Coordinated.TRANSACTION):
        await_coordinator(admin, kind, "any")


def _beside(broker: Broker, attack: str, target: Target, pace: Pace) -> Metrics:
    warm_up(broker, _WARM, pace.warm_up)
    alone = run_workload(broker, _STEADY, pace.timing)
    watch = _PeakMemory(broker)
    watch.start()
    try:
        with attacking(attack, target) as answered:
            time.sleep(_RAMP_S)
            before, began = answered(), time.monotonic()
            attacked = run_workload(broker, _STEADY, pace.timing)
            rate = (answered() - before) / (time.monotonic() - began)
    except AttackFailed as error:
        raise BrokerError(str(error)) from error
    finally:
        watch.stop()
    return {
        "alone_p99_ms": alone["produce_p99_ms"],
        "attacked_p50_ms": attacked["produce_p50_ms"],
        "attacked_p99_ms": attacked["produce_p99_ms"],
        "attacked_max_ms": attacked["produce_max_ms"],
        "p99_ratio": attacked["produce_p99_ms"] / alone["produce_p99_ms"],
        "attack_per_s": rate,
        "steady_per_s": attacked["requests_per_s"],
        "peak_rss_mb": watch.peak_bytes / 2**20,
        "other_cores": attacked["other_cores"],
    }


class _PeakMemory(threading.Thread):
    def __init__(self, broker: Broker) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._over = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._over.wait(_WATCH_S):
            with suppress(OSError):
                self.peak_bytes = max(self.peak_bytes, self._broker.memory_bytes()[0])

    def stop(self) -> None:
        self._over.set()
        self.join()


SCENARIOS = tuple(
    Scenario(
        name=f"neighbour-{attack}",
        title=f"beside {title}",
        measure=_measure(attack),
        shown=("alone_p99_ms", "attacked_p99_ms", "p99_ratio", "attack_per_s", "peak_rss_mb"),
        quick=True,
        needs_warm=False,
    )
    for attack, title in _TITLES.items()
)
