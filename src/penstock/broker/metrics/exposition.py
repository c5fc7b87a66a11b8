"""A node's counters as Prometheus text.

A scrape first copies plain numbers on the event loop, a bounded piece at a time, and then turns them into text in
a thread. The Prometheus library is loaded by the first scrape and never touched by what it measures. Labels are
bounded by what operators made: topics, partitions, groups, listeners, and the APIs and errors of the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock import __version__
from penstock.broker.apis import APIS
from penstock.broker.logs import suppressed_lines
from penstock.broker.metrics import LATENCY_BUCKETS, Histogram
from penstock.groups.shard import GroupShard
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition

logger = logging.getLogger("penstock.metrics")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: What is copied before the loop gets to do something else.
_PIECE_PARTITIONS: Final = 200
_PIECE_GROUPS: Final = 50
_GROUPS_SECONDS_MAX: Final = 5.0
#: What other nodes may take to tell where their partitions end, and for how long that is good.
_ENDS_SECONDS_MAX: Final = 2.0
_ENDS_FRESH_S: Final = 5.0

Labels = tuple[str, ...]


class Timings(NamedTuple):
    """A histogram as it was at one moment; counts are per bucket, not cumulative."""

    counts: tuple[int, ...]
    total_seconds: float


class Family(NamedTuple):
    """One metric: `kind` is counter, gauge or histogram, and samples have one value for each label."""

    kind: str
    name: str
    help: str
    labels: Labels
    samples: Sequence[tuple[Labels, float | Timings]]


class Exposition:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._ends = RemoteEnds(node)
        self._scrape: asyncio.Future[bytes] | None = None

    async def scrape(self) -> bytes:
        """Those who ask at the same time share one scrape, so that asking often costs little."""
        if self._scrape is None:
            self._scrape = asyncio.ensure_future(self._scrape_once())
            self._scrape.add_done_callback(self._finished)
        return await asyncio.shield(self._scrape)

    async def _scrape_once(self) -> bytes:
        families = await snapshot(self._node, self._ends)
        return await self._node.in_thread(render, families)

    def _finished(self, scrape: asyncio.Future[bytes]) -> None:
        self._scrape = None
        if not scrape.cancelled():
            scrape.exception()  # whoever still waits is told; nobody else has to be


# -- on the loop: numbers --------------------------------------------------------------------------------


async def snapshot(node: Node, ends: RemoteEnds | None = None) -> Iterator[Family]:
    """All numbers are taken here; what is many is sorted into families by whoever goes through them."""
    from penstock.broker.replication_metrics import Counted, FollowerRow, follower_rows, replication_families

    families = [*_node_families(node), *_request_families(node), *_topic_families(node)]
    partitions: list[_PartitionRow] = []
    followers: list[FollowerRow] = []
    counted, damaged = Counted(), _Damaged()
    for piece in _pieces(list(node.partitions), _PIECE_PARTITIONS):
        for partition in piece:
            partitions.append(_partition_row(partition))
            followers += follower_rows(partition)
            counted = counted.and_also(partition)
            damaged.add(partition)
        await asyncio.sleep(0)
    families += replication_families(node, counted, followers)
    families += damaged.families(node)
    if "transactions" in node.__dict__:
        from penstock.broker.transactions.metrics import transaction_families

        families += transaction_families(node.transactions)
    if "share_state" in node.__dict__:
        from penstock.broker.share_state.metrics import dead_letter_families, share_total_families

        families += dead_letter_families(node.share_state.dead_letters)
        families += share_total_families(node)
    if "share" in node.__dict__:
        from penstock.broker.share.metrics import share_families

        families += share_families(node.share)
    if "schedule" in node.__dict__:
        from penstock.broker.schedule.metrics import schedule_families

        families += schedule_families(node.schedule)
    groups = await _read_groups(node, ends)
    return chain(families, _partition_families(partitions), _group_families(groups))


def _node_families(node: Node) -> Iterator[Family]:
    metrics, server = node.metrics, node.server
    build = (__version__, "{}.{}.{}".format(*sys.version_info[:3]))
    yield Family("gauge", "penstock_build_info", "What runs here.", ("version", "python"), [(build, 1)])
    identity = (str(node.node_id), node.cluster_id)
    yield Family("gauge", "penstock_node_info", "Who this is.", ("node_id", "cluster_id"), [(identity, 1)])
    yield gauge("penstock_ready", "1 while the node serves its listeners.", node.state == "serving")
    connections = Counter(connection.listener for connection in tuple(server.connections))
    yield Family(
        "gauge",
        "penstock_connections",
        "Open connections of clients.",
        ("listener",),
        [((listener.name,), connections[listener.name]) for listener in node.listeners],
    )
    yield counter("penstock_connections_refused", "Connections over a limit.", metrics.connections_refused)
    if "telemetry" in node.__dict__:
        telemetry = node.telemetry
        yield gauge(
            "penstock_telemetry_clients", "Clients that have asked which metrics to push.", telemetry.clients
        )
        yield counter("penstock_telemetry_pushes", "Pushes of client metrics taken.", telemetry.pushes)
        yield counter("penstock_telemetry_bytes", "Bytes of client metrics taken.", telemetry.bytes_pushed)
    yield Family(
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
        "penstock_storage_errors", "Requests that the disk kept from being served.", _storage_errors(node)
    )
    yield gauge(
        "penstock_request_buffer_bytes",
        "Memory held by requests that are still arriving.",
        server.buffers.bytes_in_use,
    )
    yield gauge("penstock_fetch_sessions", "Incremental fetch sessions.", len(node.fetch_sessions))
    yield counter(
        "penstock_fetch_session_evictions",
        "Sessions that made room for others.",
        node.fetch_sessions.evictions,
    )
    yield Family(
        "histogram", "penstock_flush_seconds", "Time to sync a log.", (), [((), _timings(metrics.flushes))]
    )
    yield counter(
        "penstock_log_lines_suppressed", "Lines left out of the node's own log.", suppressed_lines()
    )


class _Damaged:
    """What of the partitions cannot be served because its bytes are not what was written."""

    def __init__(self) -> None:
        self._partitions = self._offsets = 0

    def add(self, partition: Partition) -> None:
        damages = partition.log.damages
        if damages:
            self._partitions += 1
            self._offsets += sum(item.end_offset - item.start_offset for item in damages)

    def families(self, node: Node) -> Iterator[Family]:
        text = "Partitions that cannot be opened, or whose folder is gone."
        not_open = len(node.store.failed) + len(node.partitions.missing)
        yield gauge("penstock_partitions_failed", text, not_open)
        text = "Partitions with damaged records that are refused to readers."
        yield gauge("penstock_partitions_damaged", text, self._partitions)
        yield gauge("penstock_damaged_offsets", "Offsets refused because of damage.", self._offsets)


def _storage_errors(node: Node) -> int:
    errors = node.metrics.errors.items()
    return sum(count for (_, error), count in errors if error == ErrorCode.kafka_storage_error.name)


def _request_families(node: Node) -> Iterator[Family]:
    metrics = node.metrics
    yield Family(
        "histogram",
        "penstock_request_seconds",
        "Time from a whole request to its answer; a fetch includes the wait it asked for.",
        ("api",),
        [((APIS[key].name,), _timings(timings)) for key, timings in metrics.requests.items() if key in APIS],
    )
    yield Family(
        "counter",
        "penstock_request_errors",
        "Errors answered, by their name in the protocol.",
        ("api", "error"),
        list(metrics.errors.items()),
    )


#: Attribute of TopicTraffic, name, help.
_TRAFFIC: Final = (
    ("bytes_in", "penstock_topic_in_bytes", "Bytes appended, as they are stored."),
    ("bytes_out", "penstock_topic_out_bytes", "Bytes read by clients, as they are stored."),
    ("messages_in", "penstock_topic_in_messages", "Messages appended."),
    ("messages_out", "penstock_topic_out_messages", "Messages read by clients, by the offsets they span."),
    ("fetches", "penstock_topic_reads", "Reads by clients that returned something."),
    ("replica_bytes_out", "penstock_topic_replica_out_bytes", "Bytes read by followers."),
)


def _topic_families(node: Node) -> Iterator[Family]:
    topics = list(node.metrics.topics.items())
    for attribute, name, text in _TRAFFIC:
        samples = [((topic,), getattr(traffic, attribute)) for topic, traffic in topics]
        yield Family("counter", name, text, ("topic",), samples)
    text = "Time from an acks=all append to its acknowledgement: the longest of those acknowledged together."
    acks = [((topic,), _timings(traffic.acks)) for topic, traffic in topics]
    yield Family("histogram", "penstock_topic_ack_seconds", text, ("topic",), acks)


class _PartitionRow(NamedTuple):
    labels: Labels
    start_offset: int
    end_offset: int
    high_watermark: int
    last_stable_offset: int
    size_bytes: int
    segments: int


#: Attribute of _PartitionRow, name, help.
_PARTITION: Final = (
    ("start_offset", "penstock_partition_start_offset", "First offset that can be read."),
    ("end_offset", "penstock_partition_end_offset", "Offset that the next message gets."),
    ("high_watermark", "penstock_partition_high_watermark_offset", "Offset up to which clients may read."),
    (
        "last_stable_offset",
        "penstock_partition_last_stable_offset",
        "Offset up to which readers of what is committed may read: a transaction that hangs keeps it where it is.",
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


def _partition_families(rows: list[_PartitionRow]) -> Iterator[Family]:
    for attribute, name, text in _PARTITION:
        samples = [(row.labels, getattr(row, attribute)) for row in rows]
        yield Family("gauge", name, text, ("topic", "partition"), samples)


class _GroupRow(NamedTuple):
    group: str
    state: str
    members: int


class _Groups(NamedTuple):
    """`shown` are the groups that have metrics of their own, `positions` what those have committed."""

    states: Counter[str]
    shown: list[_GroupRow]
    omitted: int
    positions: list[tuple[Labels, int, int | None]]  # committed offset, lag where the partition exists
    positions_omitted: int
    #: Partitions of other nodes that did not tell where they end.
    lag_unknown: int = 0


class RemoteEnds:
    """High watermarks of partitions without a replica here, which their leaders tell; remembered for a while.

    Scrapes come often and groups share topics, so a leader is asked once for all that it leads, and not every time.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[tuple[str, int], tuple[float, int]] = {}

    async def of(self, places: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Those that are known within a bounded time."""
        now_s = asyncio.get_running_loop().time()
        self._known = {
            place: known
            for place, known in self._known.items()
            if place in places and now_s - known[0] < _ENDS_FRESH_S
        }
        if wanted := places - self._known.keys():
            await self._ask(wanted, now_s)
        return {place: end for place, (_, end) in self._known.items()}

    async def _ask(self, wanted: set[tuple[str, int]], now_s: float) -> None:
        from penstock.broker.share.end_offsets import end_offsets

        try:
            async with asyncio.timeout(_ENDS_SECONDS_MAX):
                answers = await end_offsets(self._node, sorted(wanted))
        except (TimeoutError, ApiError) as error:
            logger.warning("lag of some groups is missing from the metrics", extra={"reason": repr(error)})
            return
        self._known |= {place: (now_s, end) for place, end in answers.items() if isinstance(end, int)}


async def _read_groups(node: Node, ends: RemoteEnds | None) -> _Groups | None:
    """None when a coordinator does not answer: a missing number is better than a wrong one."""
    try:
        async with asyncio.timeout(_GROUPS_SECONDS_MAX):
            rows = [row async for rows in node.groups.read_each(_group_rows) for row in rows]
            states = Counter(row.state for row in rows)
            count_max = node.settings.integer("penstock.metrics.groups.max")
            omitted = max(len(rows) - count_max, 0)
            if omitted:
                rows.sort(key=lambda row: (row.members == 0, row.group))
                del rows[count_max:]
            positions, positions_omitted = await _read_positions(node, rows)
    except (TimeoutError, ApiError) as error:
        logger.warning("groups are missing from the metrics", extra={"reason": repr(error)})
        return None
    if ends is None:
        return _Groups(states, rows, omitted, positions, positions_omitted)
    positions, unknown = await _with_remote_lag(node, ends, positions)
    return _Groups(states, rows, omitted, positions, positions_omitted, unknown)


async def _with_remote_lag(
    node: Node, ends: RemoteEnds, positions: list[tuple[Labels, int, int | None]]
) -> tuple[list[tuple[Labels, int, int | None]], int]:
    """Also of partitions that are nowhere on this node; and of how many the lag is not known."""
    places = {
        (names[1], int(names[2]))
        for names, _, lag in positions
        if lag is None and node.image.partition(names[1], int(names[2])) is not None
    }
    if not places:
        return positions, 0
    found = await ends.of(places)
    told = [
        (names, committed, max(end - committed, 0))
        if lag is None and (end := found.get((names[1], int(names[2])))) is not None
        else (names, committed, lag)
        for names, committed, lag in positions
    ]
    return told, len(places) - len(found)


def _group_rows(shard: GroupShard) -> list[_GroupRow]:
    return [_GroupRow(name, group.state_name, group.member_count) for name, group in shard.groups.items()]


async def _read_positions(
    node: Node, groups: list[_GroupRow]
) -> tuple[list[tuple[Labels, int, int | None]], int]:
    """What these groups have committed, and how much of that is too much to show."""
    positions: list[tuple[Labels, int, int | None]] = []
    left, omitted = node.settings.integer("penstock.metrics.group.offsets.max"), 0
    for count, row in enumerate(groups, start=1):
        shown, total = await node.groups.read(row.group, _committed(node, row.group, left))
        positions += shown
        left -= len(shown)
        omitted += total - len(shown)
        if count % _PIECE_GROUPS == 0:
            await asyncio.sleep(0)
    return positions, omitted


def _committed(
    node: Node, group_id: str, count_max: int
) -> Callable[[GroupShard], tuple[list[tuple[Labels, int, int | None]], int]]:
    """The first of a group's committed offsets, and how many there are."""

    def read(shard: GroupShard) -> tuple[list[tuple[Labels, int, int | None]], int]:
        shown, total = [], 0
        for topic, index, committed in shard.offsets.of_group(group_id):
            total += 1
            if total <= count_max:
                shown.append(_position(node, group_id, topic, index, committed.offset))
        return shown, total

    return read


def _position(
    node: Node, group_id: str, topic: str, index: int, committed: int
) -> tuple[Labels, int, int | None]:
    partition = node.partitions.get(topic, index)
    lag = None if partition is None else max(partition.high_watermark - committed, 0)
    return (group_id, topic, str(index)), committed, lag


def _group_families(groups: _Groups | None) -> Iterator[Family]:
    yield gauge("penstock_coordinators_ready", "1 while every group coordinator answers.", groups is not None)
    if groups is None:
        return
    states = [((state,), count) for state, count in groups.states.items()]
    yield Family("gauge", "penstock_groups", "Groups by state.", ("state",), states)
    text = "Groups without metrics of their own: there are more than penstock.metrics.groups.max."
    yield gauge("penstock_groups_omitted", text, groups.omitted)
    members = [((row.group,), row.members) for row in groups.shown]
    yield Family("gauge", "penstock_group_members", "Members of a group.", ("group",), members)
    labels = ("group", "topic", "partition")
    committed = [(names, offset) for names, offset, _ in groups.positions]
    yield Family("gauge", "penstock_group_committed_offset", "Where the group goes on.", labels, committed)
    lags = [(names, lag) for names, _, lag in groups.positions if lag is not None]
    text = "Messages between what the group has committed and what it could read."
    yield Family("gauge", "penstock_group_lag_messages", text, labels, lags)
    text = "Partitions of other nodes whose end, and so the lag of their groups, is not known at present."
    yield gauge("penstock_group_lag_unknown", text, groups.lag_unknown)
    text = "Committed offsets that are not shown: there are more than penstock.metrics.group.offsets.max."
    yield gauge("penstock_group_offsets_omitted", text, groups.positions_omitted)


def _timings(histogram: Histogram) -> Timings:
    return Timings(tuple(histogram.counts), histogram.total_seconds)


def gauge(name: str, text: str, value: float) -> Family:
    return Family("gauge", name, text, (), [((), value)])


def counter(name: str, text: str, value: float) -> Family:
    return Family("counter", name, text, (), [((), value)])


def _pieces(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# -- in a thread: text -----------------------------------------------------------------------------------


def render(families: Iterable[Family]) -> bytes:
    """Blocking: loads the Prometheus library, and takes a while with many partitions."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Families:
    """A collector, as the Prometheus library calls what hands it metrics."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return map(_collected, self._families)


def _collected(family: Family) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    metric = kinds[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        if isinstance(value, Timings):
            metric.add_metric(labels, buckets=_cumulative(value), sum_value=value.total_seconds)
        else:
            metric.add_metric(labels, value)
    return metric


def _cumulative(timings: Timings) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BUCKETS), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, timings.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
