"""Counters of one node as plain numbers: the hot path increments them, a scrape renders them as Prometheus text."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

#: Upper bounds in seconds; a histogram has one more bucket for everything above.
LATENCY_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip


class Histogram:
    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self.total_seconds += seconds


class TopicMetrics:
    __slots__ = (
        "acks", "bytes_in", "bytes_out", "fetches", "messages_in", "messages_out", "refused", "replica_bytes_out",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = self.messages_in = self.messages_out = 0
        self.fetches = self.replica_bytes_out = 0
        self.acks = Histogram()
        #: Records that an overflow policy has refused, by policy and reason; a retry counts again.
        self.refused: Counter[tuple[str, str]] = Counter()


class Metrics:
    def __init__(self) -> None:
        self.requests: dict[int, Histogram] = {}
        self.topics: dict[str, TopicMetrics] = {}
        self.errors: dict[tuple[str, str], int] = {}  # (api, error code) -> count
        self.node_requests_refused: dict[
            str, int
        ] = {}  # API -> requests between nodes refused on client listeners
        self.connections_refused = 0
        self.authentication_failures: dict[tuple[str, str], int] = {}  # (listener, kind) -> count
        self.tls_handshakes: dict[str, int] = {}  # by listener
        self.malformed_frames = 0
        self.held_producers = 0  # produced batches that have to wait for room
        self.internal_errors = 0
        # Counted by the active controller.
        self.controller_elections = 0
        self.brokers_fenced = 0
        self.unclean_elections = 0
        self.flushes = Histogram()
        self.isr_shrinks = self.isr_expands = 0
        self.unclean_leaderships = 0  # partitions that this node came to lead by an unclean election
        self.replicas_lost = 0  # replicas of this node that were missing or damaged

    def observe_request(self, api_key: int, seconds: float) -> None:
        histogram = self.requests.get(api_key)
        if histogram is None:
            histogram = self.requests[api_key] = Histogram()
        histogram.counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        histogram.total_seconds += seconds

    def count_error(self, api: str, error: str) -> None:
        self.errors[api, error] = self.errors.get((api, error), 0) + 1

    def count_node_request_refused(self, api: str) -> None:
        self.node_requests_refused[api] = self.node_requests_refused.get(api, 0) + 1

    def count_authentication_failure(self, listener: str, kind: str) -> None:
        key = (listener, kind)
        self.authentication_failures[key] = self.authentication_failures.get(key, 0) + 1

    def count_tls_handshake(self, listener: str) -> None:
        self.tls_handshakes[listener] = self.tls_handshakes.get(listener, 0) + 1

    def traffic(self, topic: str) -> TopicMetrics:
        traffic = self.topics.get(topic)
        if traffic is None:
            traffic = self.topics[topic] = TopicMetrics()
        return traffic


# -- what a scrape copies ----------------------------------------------------------------------------------

Labels = tuple[str, ...]


class HistogramSnapshot(NamedTuple):
    """A histogram as it was at one moment; counts are per bucket, not cumulative."""

    counts: tuple[int, ...]
    total_seconds: float


class MetricFamily(NamedTuple):
    """One metric: `kind` is counter, gauge or histogram, and samples have one value for each label."""

    kind: str
    name: str
    help: str
    labels: Labels
    samples: Sequence[tuple[Labels, float | HistogramSnapshot]]


def histogram_snapshot(histogram: Histogram) -> HistogramSnapshot:
    return HistogramSnapshot(tuple(histogram.counts), histogram.total_seconds)


def gauge(name: str, text: str, value: float) -> MetricFamily:
    return MetricFamily("gauge", name, text, (), [((), value)])


def counter(name: str, text: str, value: float) -> MetricFamily:
    return MetricFamily("counter", name, text, (), [((), value)])
