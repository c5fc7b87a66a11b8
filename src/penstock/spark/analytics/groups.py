"""How far behind groups are: in records, and by the age of the oldest record that they have not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.batches import batches, visible
from penstock.client.cluster import Cluster
from penstock.client.errors import OutOfRange
from penstock.client.fetching import PartitionReader
from penstock.client.metadata import Isolation, Place
from penstock.client.positions import EARLIEST, LATEST, OffsetAt, committed, list_groups, list_offsets
from penstock.protocol.records import decode_records

_RECORD_BYTES_MAX: Final = 64 << 20
#: Brokers give one batch at least.
_FETCH_BYTES: Final = 1
_SHARE: Final = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    group: str
    topic: str
    #: Offsets that are not read yet.
    lag: int
    #: 0 where all is read; None where nobody can tell.
    latency_s: float | None


def group_states(cluster: Cluster, topics: re.Pattern[str], *, now_ms: int) -> list[GroupState]:
    """Of every group in every topic that matches and that it has a position in. Raises Unavailable, Refused."""
    names = [each.group for each in list_groups(cluster) if each.kind != _SHARE]
    positions = {name: _positions(cluster, name, topics) for name in names}
    places = sorted({place for found in positions.values() for place in found})
    there = cluster.topics({topic for topic, _ in places})
    places = [place for place in places if place[0] in there]
    first, last = (_offsets(cluster, places, edge) for edge in (EARLIEST, LATEST))
    found = []
    for name, at in positions.items():
        waiting = {place: max(at[place], first[place]) for place in places if place in at}
        found += _states(cluster, name, waiting, last, now_ms)
    return found


def _positions(cluster: Cluster, group: str, topics: re.Pattern[str]) -> dict[Place, int]:
    found = committed(cluster, group, stable=False)
    return {place: at.offset for place, at in found.items() if topics.fullmatch(place[0])}


def _offsets(cluster: Cluster, places: list[Place], edge: int) -> dict[Place, int]:
    found: Mapping[Place, OffsetAt | None] = (
        list_offsets(cluster, dict.fromkeys(places, edge)) if places else {}
    )
    return {place: at.offset if at is not None else 0 for place, at in found.items()}


def _states(
    cluster: Cluster, group: str, at: Mapping[Place, int], ends: Mapping[Place, int], now_ms: int
) -> list[GroupState]:
    lags: dict[str, int] = {}
    ages: dict[str, float | None] = {}
    for place, position in at.items():
        lag = max(ends[place] - position, 0)
        lags[place[0]] = lags.get(place[0], 0) + lag
        ages.setdefault(place[0], 0.0 if not lag else None)
        if lag and (written_ms := timestamp_at(cluster, place, position)) is not None:
            ages[place[0]] = max(ages[place[0]] or 0.0, (now_ms - written_ms) / 1000, 0.0)
    return [
        GroupState(group=group, topic=topic, lag=lag, latency_s=ages[topic]) for topic, lag in lags.items()
    ]


def timestamp_at(cluster: Cluster, place: Place, offset: int) -> int | None:
    """Of the first record there or after it, in the first batches; None where these have none, or are gone."""
    reader = PartitionReader(
        cluster, place[0], None, place[1], isolation=Isolation.READ_COMMITTED, bytes_max=_FETCH_BYTES
    )
    try:
        fetched = reader.fetch(offset, wait_ms=0)
    except OutOfRange:
        return None
    for view in visible(batches(fetched.data), fetched.aborted):
        for record in decode_records(view.data, _RECORD_BYTES_MAX):
            if record.offset >= offset:
                return int(record.timestamp)
    return None
