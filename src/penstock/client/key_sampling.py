"""The keys of a topic, looked at where they are: windows of its partitions, counted by the rules of `hotkeys`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.deadletters.reading import Span, records, spans
from penstock.client.hotkeys import HeavyKeys, HotKey, Window, parted, windows
from penstock.client.metadata import TopicInfo

__all__ = ["PartitionKeys", "sampled"]

#: A window needs few bytes, and what is behind it is sent in vain.
_WINDOW_BYTES_MIN: Final = 16 << 10
_WINDOW_BYTES_MAX: Final = 1 << 20
_RECORD_BYTES: Final = 256
#: Of a partition that is read as a whole, counted at a time.
_RECORDS_AT_ONCE: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionKeys:
    partition: int
    first_offset: int
    next_offset: int
    #: Records that were looked at.
    sampled: int
    keyless: int
    #: Whether these were all.
    is_whole: bool
    keys: tuple[HotKey, ...]


def sampled(
    cluster: Cluster,
    topic: TopicInfo,
    *,
    sample: int,
    top: int,
    chance: Random,
    partitions: Sequence[int] | None = None,
) -> Iterator[PartitionKeys]:
    """The heaviest keys of each partition, by about `sample` records of all of them together.

    What is in transactions counts once it is committed. Raises Unavailable, Refused, TopicChanged, CorruptRecords.
    """
    wanted = [span for span in spans(cluster, topic) if partitions is None or span.partition in partitions]
    shares = parted(sample, [max(span.end - span.start, 0) for span in wanted])
    for span, share in zip(wanted, shares, strict=True):
        yield _looked_at(cluster, topic, span, windows(span.start, span.end, share, chance), top)


def _looked_at(
    cluster: Cluster, topic: TopicInfo, span: Span, looks: list[Window], top: int
) -> PartitionKeys:
    seen = sum(window.end - window.start for window in looks)
    is_whole = seen >= span.end - span.start
    counted = HeavyKeys(part=1 if is_whole else seen / (span.end - span.start))
    for window in looks:
        found = _sizes(cluster, topic, Span(span.partition, *window), is_whole)
        if not is_whole:
            counted.add_window(found)
        while is_whole and (some := list(islice(found, _RECORDS_AT_ONCE))):
            counted.add_window(some)
    return PartitionKeys(
        partition=span.partition,
        first_offset=span.start,
        next_offset=span.end,
        sampled=counted.records,
        keyless=counted.keyless,
        is_whole=is_whole,
        keys=tuple(counted.heaviest(top)),
    )


def _sizes(
    cluster: Cluster, topic: TopicInfo, span: Span, is_whole: bool
) -> Iterator[tuple[bytes | None, int]]:
    bytes_max = None if is_whole else _window_bytes(span.end - span.start)
    for record in records(cluster, topic, span, bytes_max=bytes_max):
        yield record.key, len(record.key or b"") + len(record.value or b"")


def _window_bytes(count: int) -> int:
    """About what so many records take."""
    return min(max(count * _RECORD_BYTES, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
