"""How many records a pipeline has not read yet: those that it will read, and no others.

Offsets also belong to transaction markers, to records of aborted transactions, and in retry topics to records that
other groups retry. What one fetch of a partition returns is counted record by record; of what lies beyond that each
offset counts, so that a large lag costs no more to know than a small one.
"""

from __future__ import annotations

from typing import Final

from penstock.client.batches import BatchView, batches, visible
from penstock.client.cluster import Cluster
from penstock.client.errors import OutOfRange
from penstock.client.fetching import PartitionReader
from penstock.client.letters import is_for, retry_level
from penstock.client.metadata import Isolation, Place
from penstock.client.positions import LATEST, committed, list_offsets
from penstock.protocol.records import decode_records

_FETCH_BYTES: Final = 1 << 20
_RECORD_BYTES_MAX: Final = 64 << 20


def lag_of(cluster: Cluster, group: str) -> int | None:
    """Records up to the last stable offset that the group has not read; None while it has no positions.

    Raises Unavailable, Refused.
    """
    positions = committed(cluster, group, stable=False)
    there = cluster.topics({topic for topic, _ in positions})
    known = {place: at.offset for place, at in positions.items() if place[0] in there}
    if not known:
        return None
    ends = list_offsets(cluster, dict.fromkeys(known, LATEST), isolation=Isolation.READ_COMMITTED)
    unread = {place: (known[place], end.offset) for place, end in ends.items() if end is not None}
    return sum(_count(cluster, group, place, *each) for place, each in unread.items() if each[0] < each[1])


def _count(cluster: Cluster, group: str, place: Place, start: int, end: int) -> int:
    reader = PartitionReader(
        cluster, place[0], None, place[1], isolation=Isolation.READ_COMMITTED, bytes_max=_FETCH_BYTES
    )
    try:
        fetched = reader.fetch(start, wait_ms=0)
    except OutOfRange:
        return end - start  # its position is gone, and the pipeline will say so
    names_group = retry_level(place[0]) is not None
    found = 0
    for view in visible(batches(fetched.data), fetched.aborted):
        if names_group or view.header.base_offset < start or view.header.last_offset >= end:
            found += _records(view, group if names_group else None, start, end)
        else:
            found += view.header.record_count
    return found + max(end - max(fetched.next_offset, start), 0)


def _records(view: BatchView, group: str | None, start: int, end: int) -> int:
    return sum(
        start <= record.offset < end and (group is None or is_for(record.headers, group))
        for record in decode_records(view.data, _RECORD_BYTES_MAX)
    )
