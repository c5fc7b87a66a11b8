"""Finds hot keys: samples the partitions of a topic, counts keys and bytes, and says how far off each share may be.

The sample of a partition is a number of windows of equal length, one at a random offset in each part of its range, so
that every record is equally likely to be seen, whatever the batches look like. Neighbouring records are often alike,
so the error of a share comes from how much the windows differ, not from how many records were seen.

`penstock.client.salting` spreads a key that is too hot, and says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from penstock.client.deadletters.reader import OffsetRange, offset_ranges, read_records
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo

__all__ = (
    "HOT_SHARE",
    "HotKey",
    "KeyCounter",
    "PartitionKeys",
    "SampleWindow",
    "display_key",
    "salting_advice",
    "sample_keys",
    "sample_sizes",
    "sample_windows",
)


#: A key with at least this share of its partition's records or bytes is hot.
HOT_SHARE: Final = 0.25
WINDOWS_MAX: Final = 100
#: Smaller windows cost more requests than they are worth.
WINDOW_RECORDS_MIN: Final = 20
#: How many keys of a partition are counted at once.
KEYS_MAX: Final = 50_000
_KEY_CHARACTERS_MAX: Final = 48
_NORMAL_95: Final = 1.96


# Sampling


class SampleWindow(NamedTuple):
    """Offsets from `start` to before `end`."""

    start: int
    end: int


def sample_sizes(sample: int, sizes: Sequence[int]) -> list[int]:
    """Divides the sample among partitions by size, with a minimum for each partition that has records."""
    whole = sum(sizes)
    if sample >= whole:
        return list(sizes)
    return [min(size, max(math.ceil(sample * size / whole), WINDOW_RECORDS_MIN)) for size in sizes]


def sample_windows(start: int, end: int, sample: int, chance: Random) -> list[SampleWindow]:
    """Returns windows of equal length with about `sample` offsets; one window if the log has no more."""
    count = end - start
    if count <= 0:
        return []
    if sample >= count:
        return [SampleWindow(start, end)]
    parts = max(1, min(WINDOWS_MAX, sample // WINDOW_RECORDS_MIN))
    length = max(1, sample // parts)
    found = []
    for part in range(parts):
        first, last = start + count * part // parts, start + count * (part + 1) // parts
        begin = first + chance.randrange(last - first - length + 1)
        found.append(SampleWindow(begin, begin + length))
    return found


# Counting


class WindowSums:
    """Sums of one measure of a key over all windows, for a ratio estimate and its variance."""

    __slots__ = ("product", "square", "total")

    def __init__(self) -> None:
        self.total = 0
        self.square = 0
        #: Of the key's measure and the whole window's.
        self.product = 0

    def add(self, amount: int, of_window: int) -> None:
        self.total += amount
        self.square += amount * amount
        self.product += amount * of_window


class KeyTally(NamedTuple):
    records: WindowSums
    bytes: WindowSums


@dataclass(frozen=True, slots=True, kw_only=True)
class HotKey:
    key: bytes
    #: In the sample.
    records: int
    bytes: int
    #: Estimates for the partition. The errors hold in 19 of 20 samples; they are 0 if the whole partition was read.
    share: float
    share_error: float
    bytes_share: float
    bytes_share_error: float

    @property
    def is_hot(self) -> bool:
        return max(self.share, self.bytes_share) >= HOT_SHARE


class KeyCounter:
    """Counts the keys of one partition. `part` is the part of the partition that the windows cover, up to 1.

    Keeps at least `capacity` keys. If there are too many, it discards the keys with the smallest counts. Later counts
    may be too low by the discarded amounts, which all errors include.
    """

    def __init__(self, *, part: float, capacity: int = KEYS_MAX) -> None:
        assert capacity >= 1, f"capacity {capacity} is below 1"
        assert 0 < part <= 1, f"part {part} is not from 0 to 1"
        self._unseen = 1 - part
        self._capacity = capacity
        self._tallies: dict[bytes, KeyTally] = {}
        self._all = KeyTally(WindowSums(), WindowSums())
        self._windows = 0
        self._forgotten_records = 0
        self._forgotten_bytes = 0
        self.keyless = 0

    def __repr__(self) -> str:
        return f"<KeyCounter of {self.records} records, {len(self._tallies)} keys>"

    @property
    def records(self) -> int:
        """The number of sampled records, with or without a key."""
        return self._all.records.total

    def add_window(self, found: Iterable[tuple[bytes | None, int]]) -> None:
        """Adds the keys and sizes of the records in one window."""
        counts: dict[bytes | None, list[int]] = {}
        for key, size in found:
            count = counts.setdefault(key, [0, 0])
            count[0] += 1
            count[1] += size
        records = sum(count[0] for count in counts.values())
        size = sum(count[1] for count in counts.values())
        self._windows += 1
        self._all.records.add(records, records)
        self._all.bytes.add(size, size)
        self.keyless += counts.pop(None, [0, 0])[0]
        for key, (key_records, key_bytes) in counts.items():
            assert key is not None
            tally = self._tallies.setdefault(key, KeyTally(WindowSums(), WindowSums()))
            tally.records.add(key_records, records)
            tally.bytes.add(key_bytes, size)
        if len(self._tallies) > 2 * self._capacity:
            self._discard_smallest()

    def _discard_smallest(self) -> None:
        """Keeps the keys with the most records and the most bytes."""
        by_records = sorted(self._tallies, key=lambda key: self._tallies[key].records.total, reverse=True)
        by_bytes = sorted(self._tallies, key=lambda key: self._tallies[key].bytes.total, reverse=True)
        half = (self._capacity + 1) // 2
        kept = dict.fromkeys([*by_records[:half], *by_bytes[:half]])
        gone = [tally for key, tally in self._tallies.items() if key not in kept]
        self._forgotten_records += max(tally.records.total for tally in gone)
        self._forgotten_bytes += max(tally.bytes.total for tally in gone)
        self._tallies = {key: self._tallies[key] for key in kept}

    def heaviest(self, top: int) -> list[HotKey]:
        """Returns the keys with the largest share of records or bytes. Ignores records without a key."""
        found = [self._hot_key(key, tally) for key, tally in self._candidates(top).items()]
        found.sort(key=lambda each: (-max(each.share, each.bytes_share), -each.records, each.key))
        return found[:top]

    def _candidates(self, top: int) -> dict[bytes, KeyTally]:
        keys = [
            *nlargest(top, self._tallies, key=lambda key: (self._tallies[key].records.total, key)),
            *nlargest(top, self._tallies, key=lambda key: (self._tallies[key].bytes.total, key)),
        ]
        return {key: self._tallies[key] for key in keys}

    def _hot_key(self, key: bytes, tally: KeyTally) -> HotKey:
        share, share_error = self._share(tally.records, self._all.records, self._forgotten_records)
        bytes_share, bytes_share_error = self._share(tally.bytes, self._all.bytes, self._forgotten_bytes)
        return HotKey(
            key=key,
            records=tally.records.total,
            bytes=tally.bytes.total,
            share=share,
            share_error=share_error,
            bytes_share=bytes_share,
            bytes_share_error=bytes_share_error,
        )

    def _share(self, of_key: WindowSums, of_all: WindowSums, forgotten: int) -> tuple[float, float]:
        """Returns the share and its error."""
        if not of_all.total:
            return 0.0, 0.0
        share = of_key.total / of_all.total
        error = self._sampling_error(share, of_key, of_all) + forgotten / of_all.total
        return share, min(error, 1.0)

    def _sampling_error(self, share: float, of_key: WindowSums, of_all: WindowSums) -> float:
        if not self._unseen:
            return 0.0
        if self._windows == 1:
            return 1.0  # one window says nothing about other parts of the log
        spread = of_key.square - 2 * share * of_key.product + share * share * of_all.square
        mean = of_all.total / self._windows
        variance = max(0.0, spread) / (self._windows - 1) / self._windows / (mean * mean)
        worth = _effective_sample_size(share, variance, self._windows, self.records)
        return _wilson_error(share, worth / self._unseen, self._windows)


def _effective_sample_size(share: float, variance: float, windows_seen: int, records: int) -> float:
    """Returns the size of a simple random sample with the same variance."""
    if variance == 0:
        return windows_seen  # all windows are equal, possibly by chance
    return min(max(share * (1 - share) / variance, 1.0), records)


def _wilson_error(share: float, drawn: float, windows_seen: int) -> float:
    """Returns the larger distance to the ends of Wilson's 95 % interval, which is wide for shares near 0 and 1."""
    quantile = _student_95(windows_seen - 1)
    square = quantile * quantile
    middle = (share + square / (2 * drawn)) / (1 + square / drawn)
    half = (
        quantile
        / (1 + square / drawn)
        * math.sqrt(share * (1 - share) / drawn + square / (4 * drawn * drawn))
    )
    return max(share - (middle - half), (middle + half) - share)


def _student_95(freedom: int) -> float:
    """Returns the 95 % quantile of Student's distribution to within 3 %, for variances of few windows."""
    return _NORMAL_95 + 2.5 / freedom + 8 / freedom**3


# Display


def display_key(key: bytes) -> str:
    """Returns the key as printable text, truncated if it is long."""
    text = key.decode(errors="backslashreplace")
    printable = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return (
        printable if len(printable) <= _KEY_CHARACTERS_MAX else printable[: _KEY_CHARACTERS_MAX - 3] + "..."
    )


def salting_advice(hot: int) -> str | None:
    """Returns advice for this number of hot keys; None without any."""
    if not hot:
        return None
    return (
        f"keys with a quarter of their partition or more: {hot}. penstock.client.salting spreads a key over several "
        "partitions; its records are then no longer in order"
    )


#: Fetch little for a window, because the records behind it are not used.
_WINDOW_BYTES_MIN: Final = 16 << 10
_WINDOW_BYTES_MAX: Final = 1 << 20
_RECORD_BYTES_ASSUMED: Final = 256
#: How many records to count at a time if a whole partition is read.
_CHUNK_RECORDS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionKeys:
    partition: int
    first_offset: int
    next_offset: int
    #: The number of sampled records.
    sampled: int
    keyless: int
    #: Whether all records of the partition were sampled.
    is_whole: bool
    keys: tuple[HotKey, ...]


def sample_keys(
    cluster: Cluster,
    topic: TopicInfo,
    *,
    sample: int,
    top: int,
    chance: Random,
    partitions: Sequence[int] | None = None,
) -> Iterator[PartitionKeys]:
    """Yields the hottest keys of each partition, from about `sample` records of the topic.

    Counts only committed records. Raises Unavailable, Refused, TopicChanged, CorruptRecords.
    """
    wanted = [
        span for span in offset_ranges(cluster, topic) if partitions is None or span.partition in partitions
    ]
    shares = sample_sizes(sample, [max(span.end - span.start, 0) for span in wanted])
    for span, share in zip(wanted, shares, strict=True):
        yield _sample_partition(
            cluster, topic, span, sample_windows(span.start, span.end, share, chance), top
        )


def _sample_partition(
    cluster: Cluster, topic: TopicInfo, span: OffsetRange, windows: list[SampleWindow], top: int
) -> PartitionKeys:
    seen = sum(window.end - window.start for window in windows)
    is_whole = seen >= span.end - span.start
    counted = KeyCounter(part=1 if is_whole else seen / (span.end - span.start))
    for window in windows:
        found = _keys_and_sizes(cluster, topic, OffsetRange(span.partition, *window), is_whole)
        if not is_whole:
            counted.add_window(found)
        while is_whole and (some := list(islice(found, _CHUNK_RECORDS))):
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


def _keys_and_sizes(
    cluster: Cluster, topic: TopicInfo, span: OffsetRange, is_whole: bool
) -> Iterator[tuple[bytes | None, int]]:
    bytes_max = None if is_whole else _window_bytes(span.end - span.start)
    for record in read_records(cluster, topic, span, bytes_max=bytes_max):
        yield record.key, len(record.key or b"") + len(record.value or b"")


def _window_bytes(count: int) -> int:
    """Returns the approximate size of this many records."""
    return min(max(count * _RECORD_BYTES_ASSUMED, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
