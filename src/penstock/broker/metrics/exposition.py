"""The Prometheus exposition of a node's metrics, replication and consumer groups included.

A scrape first copies numbers on the event loop, in bounded chunks, and then renders them as text in a thread. The
first scrape loads the Prometheus library; the measured code never uses it. Labels are limited to what operators create
(topics, partitions, groups, listeners) and to the APIs and errors of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock import __version__
from penstock.broker.config.logging import suppressed_lines
from penstock.broker.metrics.coordinators import coordinator_families
from penstock.broker.metrics.counters import (
    LATENCY_BUCKETS,
    HistogramSnapshot,
    Labels,
    MetricFamily,
    counter,
    gauge,
    histogram_snapshot,
)
from penstock.broker.network.apis import APIS
from penstock.broker.partition.leader_replica import monotonic_ms
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.listeners import Listener
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.environment import Lazy, Threads
    from penstock.broker.metrics.client_telemetry import ClientTelemetry
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.requests import BrokerCalls
    from penstock.broker.network.server import Server
    from penstock.broker.partition.fetch_sessions import FetchSessions
    from penstock.broker.partition.partition import Partition
    from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager
    from penstock.broker.partition.replica_manager import ReplicaManager
    from penstock.broker.quorum import Quorum
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.log.log_manager import LogManager


logger = logging.getLogger("penstock.metrics")

#: Partitions and groups that are copied before the scrape yields to the event loop.
_PARTITIONS_PER_CHUNK: Final = 200
_GROUPS_PER_CHUNK: Final = 50
_GROUPS_SECONDS_MAX: Final = 5.0
#: How long other nodes may take to report the end offsets of their partitions, and how long these are cached.
_END_OFFSETS_SECONDS_MAX: Final = 2.0
_END_OFFSETS_FRESH_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """The components whose numbers a scrape reads. A lazy component has no metrics before it exists."""

    settings: NodeSettings
    listeners: tuple[Listener, ...]
    is_serving: Callable[[], bool]
    threads: Threads
    metrics: Metrics
    server: Server
    store: LogManager
    metadata: MetadataLog
    quorum: Quorum
    partitions: ReplicaManager
    fetch_sessions: FetchSessions
    groups: GroupCoordinator
    brokers: BrokerCalls
    fetchers: Lazy[ReplicaFetcherManager]
    telemetry: Lazy[ClientTelemetry]
    transactions: Lazy[TransactionCoordinator]
    share_state: Lazy[ShareCoordinator]
    share: Lazy[SharePartitionManager]
    schedule: Lazy[ScheduleCoordinator]


class Exposition:
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._ends = RemoteEndOffsets(sources)
        self._scrape: asyncio.Future[bytes] | None = None

    async def scrape(self) -> bytes:
        """Return the metrics as text. Concurrent callers share one scrape, so that frequent scrapes cost little."""
        if self._scrape is None:
            self._scrape = asyncio.ensure_future(self._scrape_once())
            self._scrape.add_done_callback(self._finished)
        return await asyncio.shield(self._scrape)

    async def _scrape_once(self) -> bytes:
        families = await collect_metrics(self._sources, self._ends)
        return await self._sources.threads.in_thread(render, families)

    def _finished(self, scrape: asyncio.Future[bytes]) -> None:
        self._scrape = None
        if not scrape.cancelled():
            scrape.exception()  # marks it as retrieved; callers that still wait get the exception


# -- on the event loop: copy numbers ---------------------------------------------------------------------


async def collect_metrics(
    sources: MetricSources, ends: RemoteEndOffsets | None = None
) -> Iterator[MetricFamily]:
    """Copy all numbers now. The families of partitions and groups are built when the caller iterates over them."""

    families = [*_node_families(sources), *_request_families(sources), *_topic_families(sources)]
    partitions: list[_PartitionRow] = []
    followers: list[FollowerLag] = []
    counted, damaged = PartitionCounts(), _DamageCounts()
    for piece in _chunks(list(sources.partitions), _PARTITIONS_PER_CHUNK):
        for partition in piece:
            partitions.append(_partition_row(partition))
            followers += follower_lags(partition)
            counted = counted.plus_partition(partition)
            damaged.add(partition)
        await asyncio.sleep(0)
    families += replication_families(sources, counted, followers)
    families += damaged.families(sources)
    families += coordinator_families(
        transactions=sources.transactions.existing,
        share_state=sources.share_state.existing,
        share=sources.share.existing,
        schedule=sources.schedule.existing,
    )
    groups = await _read_groups(sources, ends)
    return chain(families, _partition_families(partitions), _group_families(groups))


def _node_families(sources: MetricSources) -> Iterator[MetricFamily]:
    metrics, server = sources.metrics, sources.server
    build = (__version__, "{}.{}.{}".format(*sys.version_info[:3]))
    yield MetricFamily("gauge", "penstock_build_info", "What runs here.", ("version", "python"), [(build, 1)])
    identity = (str(sources.settings.node_id), sources.store.cluster_id)
    yield MetricFamily(
        "gauge",
        "penstock_node_info",
        "The ids of this node and its cluster, as labels; always 1.",
        ("node_id", "cluster_id"),
        [(identity, 1)],
    )
    yield gauge("penstock_ready", "1 while the node serves its listeners.", sources.is_serving())
    connections = Counter(connection.listener for connection in tuple(server.connections))
    yield MetricFamily(
        "gauge",
        "penstock_connections",
        "Open connections of clients.",
        ("listener",),
        [((listener.name,), connections[listener.name]) for listener in sources.listeners],
    )
    yield counter("penstock_connections_refused", "Connections over a limit.", metrics.connections_refused)
    if (telemetry := sources.telemetry.existing) is not None:
        yield gauge(
            "penstock_telemetry_clients", "Clients that have asked which metrics to push.", telemetry.clients
        )
        yield counter("penstock_telemetry_pushes", "Pushes of client metrics taken.", telemetry.pushes)
        yield counter("penstock_telemetry_bytes", "Bytes of client metrics taken.", telemetry.bytes_pushed)
    yield MetricFamily(
        "counter",
        "penstock_node_requests_refused",
        "Requests that only nodes send, refused on a listener for clients.",
        ("api",),
        [((api,), count) for api, count in sorted(metrics.node_requests_refused.items())],
    )
    yield counter(
        "penstock_malformed_frames",
        "Connections cut off because of what they sent.",
        metrics.malformed_frames,
    )
    yield counter(
        "penstock_internal_errors",
        "Requests that failed because of a mistake in this software.",
        metrics.internal_errors,
    )
    yield counter(
        "penstock_storage_errors",
        "Requests that failed because of an error of the disk.",
        _storage_errors(sources),
    )
    yield gauge(
        "penstock_request_buffer_bytes",
        "Memory held by requests that are still arriving.",
        server.buffers.bytes_in_use,
    )
    yield gauge("penstock_fetch_sessions", "Incremental fetch sessions.", len(sources.fetch_sessions))
    yield counter(
        "penstock_fetch_session_evictions",
        "Sessions that made room for others.",
        sources.fetch_sessions.evictions,
    )
    yield MetricFamily(
        "histogram",
        "penstock_flush_seconds",
        "Time to sync a log.",
        (),
        [((), histogram_snapshot(metrics.flushes))],
    )
    yield counter(
        "penstock_log_lines_suppressed", "Lines left out of the node's own log.", suppressed_lines()
    )


class _DamageCounts:
    """Counts the partitions and offsets that cannot be served because their stored bytes are damaged."""

    def __init__(self) -> None:
        self._partitions = self._offsets = 0

    def add(self, partition: Partition) -> None:
        damages = partition.log.damages
        if damages:
            self._partitions += 1
            self._offsets += sum(item.end_offset - item.start_offset for item in damages)

    def families(self, sources: MetricSources) -> Iterator[MetricFamily]:
        text = "Partitions that cannot be opened, or whose folder is gone."
        not_open = len(sources.store.failed) + len(sources.partitions.missing)
        yield gauge("penstock_partitions_failed", text, not_open)
        text = "Partitions with damaged records that are refused to readers."
        yield gauge("penstock_partitions_damaged", text, self._partitions)
        yield gauge("penstock_damaged_offsets", "Offsets refused because of damage.", self._offsets)


def _storage_errors(sources: MetricSources) -> int:
    errors = sources.metrics.errors.items()
    return sum(count for (_, error), count in errors if error == ErrorCode.kafka_storage_error.name)


def _request_families(sources: MetricSources) -> Iterator[MetricFamily]:
    metrics = sources.metrics
    yield MetricFamily(
        "histogram",
        "penstock_request_seconds",
        "Time from a whole request to its answer; a fetch includes the wait it asked for.",
        ("api",),
        [
            ((APIS[key].name,), histogram_snapshot(timings))
            for key, timings in metrics.requests.items()
            if key in APIS
        ],
    )
    yield MetricFamily(
        "counter",
        "penstock_request_errors",
        "Errors answered, by their name in the protocol.",
        ("api", "error"),
        list(metrics.errors.items()),
    )


#: Attribute of TopicMetrics, metric name, help text.
_TOPIC_METRICS: Final = (
    ("bytes_in", "penstock_topic_in_bytes", "Bytes appended, as they are stored."),
    ("bytes_out", "penstock_topic_out_bytes", "Bytes read by clients, as they are stored."),
    ("messages_in", "penstock_topic_in_messages", "Messages appended."),
    ("messages_out", "penstock_topic_out_messages", "Messages read by clients, by the offsets they span."),
    ("fetches", "penstock_topic_reads", "Reads by clients that returned something."),
    ("replica_bytes_out", "penstock_topic_replica_out_bytes", "Bytes read by followers."),
)


def _topic_families(sources: MetricSources) -> Iterator[MetricFamily]:
    topics = list(sources.metrics.topics.items())
    for attribute, name, text in _TOPIC_METRICS:
        samples = [((topic,), getattr(traffic, attribute)) for topic, traffic in topics]
        yield MetricFamily("counter", name, text, ("topic",), samples)
    text = "Time from an acks=all append to its acknowledgement: the longest of those acknowledged together."
    acks = [((topic,), histogram_snapshot(traffic.acks)) for topic, traffic in topics]
    yield MetricFamily("histogram", "penstock_topic_ack_seconds", text, ("topic",), acks)


class _PartitionRow(NamedTuple):
    labels: Labels
    start_offset: int
    end_offset: int
    high_watermark: int
    last_stable_offset: int
    size_bytes: int
    segments: int


#: Attribute of _PartitionRow, metric name, help text.
_PARTITION_METRICS: Final = (
    ("start_offset", "penstock_partition_start_offset", "First offset that can be read."),
    ("end_offset", "penstock_partition_end_offset", "Offset that the next message gets."),
    ("high_watermark", "penstock_partition_high_watermark_offset", "Offset up to which clients may read."),
    (
        "last_stable_offset",
        "penstock_partition_last_stable_offset",
        "The last stable offset: read_committed consumers read up to it. A transaction that hangs holds it back.",
    ),
    ("size_bytes", "penstock_partition_size_bytes", "Size of the log files."),
    ("segments", "penstock_partition_segments", "Number of log files."),
)


def _partition_row(partition: Partition) -> _PartitionRow:
    log = partition.log
    return _PartitionRow(
        (partition.topic, str(partition.index)),
        log.start_offset,
        log.end_offset,
        partition.high_watermark,
        partition.last_stable_offset,
        log.size_bytes,
        len(log.segments),
    )


def _partition_families(rows: list[_PartitionRow]) -> Iterator[MetricFamily]:
    for attribute, name, text in _PARTITION_METRICS:
        samples = [(row.labels, getattr(row, attribute)) for row in rows]
        yield MetricFamily("gauge", name, text, ("topic", "partition"), samples)


class _GroupRow(NamedTuple):
    group: str
    state: str
    members: int


class _GroupSnapshot(NamedTuple):
    """`shown` are the groups that have metrics of their own; `positions` are their committed offsets."""

    states: Counter[str]
    shown: list[_GroupRow]
    omitted: int
    positions: list[tuple[Labels, int, int | None]]  # labels, committed offset, lag (None: unknown)
    positions_omitted: int
    #: Partitions of other nodes whose end offset could not be obtained.
    lag_unknown: int = 0


class RemoteEndOffsets:
    """High watermarks of partitions without a replica here, requested from their leaders and cached for a while.

    Scrapes are frequent and groups share topics, so a leader gets one request for all of its partitions, and not on
    every scrape.
    """

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._known: dict[tuple[str, int], tuple[float, int]] = {}

    async def of(self, places: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the high watermarks that can be obtained within a bounded time."""
        now_s = asyncio.get_running_loop().time()
        self._known = {
            place: known
            for place, known in self._known.items()
            if place in places and now_s - known[0] < _END_OFFSETS_FRESH_S
        }
        if wanted := places - self._known.keys():
            await self._ask(wanted, now_s)
        return {place: end for place, (_, end) in self._known.items()}

    async def _ask(self, wanted: set[tuple[str, int]], now_s: float) -> None:
        from penstock.broker.coordinators.groups.end_offsets import end_offsets

        try:
            async with asyncio.timeout(_END_OFFSETS_SECONDS_MAX):
                answers = await end_offsets(self._sources.metadata, self._sources.brokers, sorted(wanted))
        except (TimeoutError, ApiError) as error:
            logger.warning("lag of some groups is missing from the metrics", extra={"reason": repr(error)})
            return
        self._known |= {place: (now_s, end) for place, end in answers.items() if isinstance(end, int)}


async def _read_groups(sources: MetricSources, ends: RemoteEndOffsets | None) -> _GroupSnapshot | None:
    """Return None if a coordinator does not reply: a missing number is better than a wrong one."""
    try:
        async with asyncio.timeout(_GROUPS_SECONDS_MAX):
            rows = [row async for rows in sources.groups.read_each(_group_rows) for row in rows]
            states = Counter(row.state for row in rows)
            count_max = sources.settings.integer("penstock.metrics.groups.max")
            omitted = max(len(rows) - count_max, 0)
            if omitted:
                rows.sort(key=lambda row: (row.members == 0, row.group))
                del rows[count_max:]
            positions, positions_omitted = await _read_committed_offsets(sources, rows)
    except (TimeoutError, ApiError) as error:
        logger.warning("groups are missing from the metrics", extra={"reason": repr(error)})
        return None
    if ends is None:
        return _GroupSnapshot(states, rows, omitted, positions, positions_omitted)
    positions, unknown = await _with_remote_lag(sources, ends, positions)
    return _GroupSnapshot(states, rows, omitted, positions, positions_omitted, unknown)


async def _with_remote_lag(
    sources: MetricSources, ends: RemoteEndOffsets, positions: list[tuple[Labels, int, int | None]]
) -> tuple[list[tuple[Labels, int, int | None]], int]:
    """Add the lag of partitions without a replica here; also return how many partitions still have an unknown lag."""
    places = {
        (names[1], int(names[2]))
        for names, _, lag in positions
        if lag is None and sources.metadata.image.partition(names[1], int(names[2])) is not None
    }
    if not places:
        return positions, 0
    found = await ends.of(places)
    completed = [
        (names, committed, max(end - committed, 0))
        if lag is None and (end := found.get((names[1], int(names[2])))) is not None
        else (names, committed, lag)
        for names, committed, lag in positions
    ]
    return completed, len(places) - len(found)


def _group_rows(shard: GroupCoordinatorShard) -> list[_GroupRow]:
    return [_GroupRow(name, group.state_name, group.member_count) for name, group in shard.groups.items()]


async def _read_committed_offsets(
    sources: MetricSources, groups: list[_GroupRow]
) -> tuple[list[tuple[Labels, int, int | None]], int]:
    """Return the committed offsets of these groups up to the configured limit, and how many were omitted."""
    positions: list[tuple[Labels, int, int | None]] = []
    left, omitted = sources.settings.integer("penstock.metrics.group.offsets.max"), 0
    for count, row in enumerate(groups, start=1):
        shown, total = await sources.groups.read(row.group, _committed_offsets_of(sources, row.group, left))
        positions += shown
        left -= len(shown)
        omitted += total - len(shown)
        if count % _GROUPS_PER_CHUNK == 0:
            await asyncio.sleep(0)
    return positions, omitted


def _committed_offsets_of(
    sources: MetricSources, group_id: str, count_max: int
) -> Callable[[GroupCoordinatorShard], tuple[list[tuple[Labels, int, int | None]], int]]:
    """Return a function that reads the first `count_max` committed offsets of a group and counts all of them."""

    def read(shard: GroupCoordinatorShard) -> tuple[list[tuple[Labels, int, int | None]], int]:
        shown, total = [], 0
        for topic, index, committed in shard.offsets.of_group(group_id):
            total += 1
            if total <= count_max:
                shown.append(_committed_offset_row(sources, group_id, topic, index, committed.offset))
        return shown, total

    return read


def _committed_offset_row(
    sources: MetricSources, group_id: str, topic: str, index: int, committed: int
) -> tuple[Labels, int, int | None]:
    partition = sources.partitions.get(topic, index)
    lag = None if partition is None else max(partition.high_watermark - committed, 0)
    return (group_id, topic, str(index)), committed, lag


def _group_families(groups: _GroupSnapshot | None) -> Iterator[MetricFamily]:
    yield gauge("penstock_coordinators_ready", "1 while every group coordinator answers.", groups is not None)
    if groups is None:
        return
    states = [((state,), count) for state, count in groups.states.items()]
    yield MetricFamily("gauge", "penstock_groups", "Groups by state.", ("state",), states)
    text = "Groups without metrics of their own: there are more than penstock.metrics.groups.max."
    yield gauge("penstock_groups_omitted", text, groups.omitted)
    members = [((row.group,), row.members) for row in groups.shown]
    yield MetricFamily("gauge", "penstock_group_members", "Members of a group.", ("group",), members)
    labels = ("group", "topic", "partition")
    committed = [(names, offset) for names, offset, _ in groups.positions]
    yield MetricFamily(
        "gauge", "penstock_group_committed_offset", "The committed offset of the group.", labels, committed
    )
    lags = [(names, lag) for names, _, lag in groups.positions if lag is not None]
    text = "Messages between what the group has committed and what it could read."
    yield MetricFamily("gauge", "penstock_group_lag_messages", text, labels, lags)
    text = "Partitions of other nodes whose end, and so the lag of their groups, is not known at present."
    yield gauge("penstock_group_lag_unknown", text, groups.lag_unknown)
    text = "Committed offsets that are not shown: there are more than penstock.metrics.group.offsets.max."
    yield gauge("penstock_group_offsets_omitted", text, groups.positions_omitted)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# -- in a thread: render text ----------------------------------------------------------------------------


def render(families: Iterable[MetricFamily]) -> bytes:
    """Blocking: loads the Prometheus library, and takes a while with many partitions."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collector:
    """Passes our metric families to the Prometheus library, through its collector interface."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return map(_prometheus_family, self._families)


def _prometheus_family(family: MetricFamily) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    metric = kinds[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        if isinstance(value, HistogramSnapshot):
            metric.add_metric(labels, buckets=_cumulative(value), sum_value=value.total_seconds)
        else:
            metric.add_metric(labels, value)
    return metric


def _cumulative(timings: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BUCKETS), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, timings.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


_ReplicaLabels = tuple[str, ...]

_REPLICA_LABELS: Final = ("topic", "partition", "replica")


class FollowerLag(NamedTuple):
    """The lag of a follower as its leader sees it."""

    labels: _ReplicaLabels
    lag_messages: int
    lag_seconds: float


class PartitionCounts(NamedTuple):
    """Counts of the partitions on this node, by role and by problem."""

    replicas: int = 0
    led: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    offline: int = 0

    def plus_partition(self, partition: Partition) -> PartitionCounts:
        leads = partition.is_leader
        return PartitionCounts(
            self.replicas + 1,
            self.led + leads,
            self.under_replicated + (leads and partition.isr_size < len(partition.replicas)),
            self.under_min_isr + (leads and not partition.has_enough_replicas),
            self.offline + (not partition.is_leader and partition.leader_id < 0),
        )


def follower_lags(partition: Partition) -> list[FollowerLag]:
    if partition.leading is None:
        return []
    return [
        FollowerLag(
            (partition.topic, str(partition.index), str(lag.replica)),
            lag.records,
            lag.since_caught_up_ms / 1000,
        )
        for lag in partition.leading.rules.lags(monotonic_ms())
    ]


def replication_families(
    sources: MetricSources, counted: PartitionCounts, rows: list[FollowerLag]
) -> Iterator[MetricFamily]:

    yield gauge("penstock_replicas", "Partitions of which this node has a replica.", counted.replicas)
    yield gauge("penstock_partitions_led", "Partitions that this node leads.", counted.led)
    text = "Partitions led here that not all replicas are in sync with."
    yield gauge("penstock_partitions_under_replicated", text, counted.under_replicated)
    text = "Partitions led here with fewer replicas in sync than min.insync.replicas."
    yield gauge("penstock_partitions_under_min_isr", text, counted.under_min_isr)
    text = "Partitions without a leader that have a replica on this node."
    offline = counted.offline + len(
        sources.partitions.refused | sources.partitions.missing | sources.partitions.lost.keys
    )
    yield gauge("penstock_partitions_offline", text, offline)
    lags = [(row.labels, float(row.lag_messages)) for row in rows if row.lag_messages >= 0]
    text = "Messages that a follower of a partition led here does not have yet."
    yield MetricFamily("gauge", "penstock_replica_lag_messages", text, _REPLICA_LABELS, lags)
    text = "Time since a follower of a partition led here last had everything."
    seconds = [(row.labels, row.lag_seconds) for row in rows]
    yield MetricFamily("gauge", "penstock_replica_lag_seconds", text, _REPLICA_LABELS, seconds)
    metrics = sources.metrics
    yield counter(
        "penstock_isr_shrinks", "Followers that fell out of in-sync sets here.", metrics.isr_shrinks
    )
    yield counter("penstock_isr_expands", "Followers that joined in-sync sets here.", metrics.isr_expands)
    yield counter(
        "penstock_unclean_leaderships",
        "Partitions that this node came to lead by an unclean election.",
        metrics.unclean_leaderships,
    )
    yield counter(
        "penstock_replicas_lost", "Copies here that were found gone or damaged.", metrics.replicas_lost
    )
    yield from _fetcher_families(sources)
    yield from _controller_families(sources)


def _controller_families(sources: MetricSources) -> Iterator[MetricFamily]:

    metrics, quorum = sources.metrics, sources.quorum
    text = "1 on the node that decides for the cluster."
    yield gauge("penstock_controller_active", text, sources.metadata.is_active)
    yield gauge("penstock_quorum_epoch", "The quorum's epoch as this node knows it.", quorum.epoch)
    text = "The quorum's leader as this node knows it; -1 while there is none."
    yield gauge("penstock_quorum_leader", text, quorum.leader_id)
    text = "The last metadata record that this node follows."
    yield gauge("penstock_metadata_applied_offset", text, sources.metadata.applied_offset)
    text = "Times that this node became the active controller."
    yield counter("penstock_controller_elections", text, metrics.controller_elections)
    text = "Brokers that this node, as controller, has given up because they were silent."
    yield counter("penstock_brokers_fenced", text, metrics.brokers_fenced)
    text = "Leaders that this node, as controller, has elected although they may lack records."
    yield counter("penstock_unclean_elections", text, metrics.unclean_elections)


def _fetcher_families(sources: MetricSources) -> Iterator[MetricFamily]:
    fetchers = sources.fetchers()
    yield counter("penstock_replica_in_bytes", "Bytes fetched from leaders.", fetchers.bytes_fetched)
    text = "Bytes fetched for replicas that are being moved here."
    yield counter("penstock_replica_moved_bytes", text, fetchers.bytes_moved)
    text = "Times that a log here was cut back to what its leader has."
    yield counter("penstock_replica_truncations", text, fetchers.truncations)
    text = "Committed messages given up here because of unclean elections."
    yield counter("penstock_committed_messages_lost", text, fetchers.records_lost)
    lags = [
        ((lag.topic, str(lag.partition), str(lag.leader)), float(lag.records))
        for lag in fetchers.lags()
        if lag.records >= 0
    ]
    text = "Committed messages that a replica here does not have yet."
    yield MetricFamily(
        "gauge", "penstock_follower_lag_messages", text, ("topic", "partition", "leader"), lags
    )
