"""The metrics of consumer groups: their state, their committed offsets and their lag."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.metrics.counters import Labels, MetricFamily, gauge
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.metrics.sources import MetricSources

logger = logging.getLogger("penstock.metrics")

#: Groups that are copied before the scrape yields to the event loop.
_GROUPS_PER_CHUNK: Final = 50
_GROUPS_SECONDS_MAX: Final = 5.0
#: How long other nodes may take to report the end offsets of their partitions, and how long these are cached.
_END_OFFSETS_SECONDS_MAX: Final = 2.0
_END_OFFSETS_FRESH_S: Final = 5.0


class _GroupRow(NamedTuple):
    group: str
    state: str
    members: int


class GroupSnapshot(NamedTuple):
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

    async def of(self, partitions: set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Return the high watermarks that can be obtained within a bounded time."""
        now_s = asyncio.get_running_loop().time()
        self._known = {
            partition: known
            for partition, known in self._known.items()
            if partition in partitions and now_s - known[0] < _END_OFFSETS_FRESH_S
        }
        if wanted := partitions - self._known.keys():
            await self._request(wanted, now_s)
        return {partition: end for partition, (_, end) in self._known.items()}

    async def _request(self, wanted: set[tuple[str, int]], now_s: float) -> None:
        from penstock.broker.coordinators.groups.end_offsets import end_offsets

        try:
            async with asyncio.timeout(_END_OFFSETS_SECONDS_MAX):
                replies = await end_offsets(self._sources.metadata, self._sources.brokers, sorted(wanted))
        except (TimeoutError, ApiError) as error:
            logger.warning("lag of some groups is missing from the metrics", extra={"reason": repr(error)})
            return
        self._known |= {partition: (now_s, end) for partition, end in replies.items() if isinstance(end, int)}


async def read_groups(sources: MetricSources, ends: RemoteEndOffsets | None) -> GroupSnapshot | None:
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
        return GroupSnapshot(states, rows, omitted, positions, positions_omitted)
    positions, unknown = await _with_remote_lag(sources, ends, positions)
    return GroupSnapshot(states, rows, omitted, positions, positions_omitted, unknown)


async def _with_remote_lag(
    sources: MetricSources, ends: RemoteEndOffsets, positions: list[tuple[Labels, int, int | None]]
) -> tuple[list[tuple[Labels, int, int | None]], int]:
    """Add the lag of partitions without a replica here; also return how many partitions still have an unknown lag."""
    partitions = {
        (names[1], int(names[2]))
        for names, _, lag in positions
        if lag is None and sources.metadata.image.partition(names[1], int(names[2])) is not None
    }
    if not partitions:
        return positions, 0
    found = await ends.of(partitions)
    completed = [
        (names, committed, max(end - committed, 0))
        if lag is None and (end := found.get((names[1], int(names[2])))) is not None
        else (names, committed, lag)
        for names, committed, lag in positions
    ]
    return completed, len(partitions) - len(found)


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


def group_families(groups: GroupSnapshot | None) -> Iterator[MetricFamily]:
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
