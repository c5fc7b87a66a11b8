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


#: Of a partition's records or bytes; with more a key is worth a look.
HOT_SHARE: Final = 0.25
WINDOWS_MAX: Final = 100
#: With fewer records a window costs more than it tells.
WINDOW_RECORDS_MIN: Final = 20
#: How many keys of a partition are remembered at once.
KEYS_MAX: Final = 50_000
_KEY_CHARACTERS_MAX: Final = 48
_NORMAL_95: Final = 1.96


# Where to look


class SampleWindow(NamedTuple):
    """Of offsets, from `start` up to and without `end`."""

    start: int
    end: int


def sample_sizes(sample: int, sizes: Sequence[int]) -> list[int]:
    """How many records to look at in each partition: as many as its size says, and some in every one that has any."""
    whole = sum(sizes)
    if sample >= whole:
        return list(sizes)
    return [min(size, max(math.ceil(sample * size / whole), WINDOW_RECORDS_MIN)) for size in sizes]


def sample_windows(start: int, end: int, sample: int, chance: Random) -> list[SampleWindow]:
    """About `sample` offsets out of all, in windows of the same length; all in one where that is no fewer."""
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


# What to count


class WindowSums:
    """Of one measure of a key over the windows: what a ratio and its variance need."""

    __slots__ = ("product", "square", "total")

    def __init__(self) -> None:
        self.total = 0
        self.square = 0
        #: With the same measure of the whole window.
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
    #: Of the partition. The errors are those that are not exceeded in 19 of 20 samples; 0 where all was read.
    share: float
    share_error: float
    bytes_share: float
    bytes_share_error: float

    @property
    def is_hot(self) -> bool:
        return max(self.share, self.bytes_share) >= HOT_SHARE


class KeyCounter:
    """Counts the keys of one partition, of which the windows are `part`: 1 where all of it is looked at.

    It remembers `capacity` keys or more. When there are too many it forgets the lightest, and from then on a count
    may be too low by no more than what was forgotten, which every error includes.
    """

    def __init__(self, *, part: float, capacity: int = KEYS_MAX) -> None:
        assert capacity >= 1, "no room for any key"
        assert 0 < part <= 1, f"windows that are {part:.0%} of a partition"
        self._unseen = 1 - part
        self._capacity = capacity
        self._tallies: dict[bytes, KeyTally] = {}
        self._all = KeyTally(WindowSums(), WindowSums())
        self._windows = 0
        self._forgotten_records = 0
        self._forgotten_bytes = 0
        self.keyless = 0

    def __repr__(self) -> str:
        return f"<HeavyKeys of {self.records} records, {len(self._tallies)} keys>"

    @property
    def records(self) -> int:
        """Seen, with or without a key."""
        return self._all.records.total

    def add_window(self, found: Iterable[tuple[bytes | None, int]]) -> None:
        """Keys and sizes of the records in one window."""
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
            self._forget()

    def _forget(self) -> None:
        """All but the heaviest, by records and by bytes."""
        by_records = sorted(self._tallies, key=lambda key: self._tallies[key].records.total, reverse=True)
        by_bytes = sorted(self._tallies, key=lambda key: self._tallies[key].bytes.total, reverse=True)
        half = (self._capacity + 1) // 2
        kept = dict.fromkeys([*by_records[:half], *by_bytes[:half]])
        gone = [tally for key, tally in self._tallies.items() if key not in kept]
        self._forgotten_records += max(tally.records.total for tally in gone)
        self._forgotten_bytes += max(tally.bytes.total for tally in gone)
        self._tallies = {key: self._tallies[key] for key in kept}

    def heaviest(self, top: int) -> list[HotKey]:
        """Those with the largest part of the records or of the bytes; records without a key are nobody's."""
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
        """The share, and how far off it may be."""
        if not of_all.total:
            return 0.0, 0.0
        share = of_key.total / of_all.total
        error = self._sampling_error(share, of_key, of_all) + forgotten / of_all.total
        return share, min(error, 1.0)

    def _sampling_error(self, share: float, of_key: WindowSums, of_all: WindowSums) -> float:
        if not self._unseen:
            return 0.0
        if self._windows == 1:
            return 1.0  # one place in a log tells nothing about the others
        spread = of_key.square - 2 * share * of_key.product + share * share * of_all.square
        mean = of_all.total / self._windows
        variance = max(0.0, spread) / (self._windows - 1) / self._windows / (mean * mean)
        worth = _effective_sample_size(share, variance, self._windows, self.records)
        return _wilson_error(share, worth / self._unseen, self._windows)


def _effective_sample_size(share: float, variance: float, windows_seen: int, records: int) -> float:
    """How many records drawn one by one would tell as much as these windows do."""
    if variance == 0:
        return windows_seen  # all alike, which may be luck
    return min(max(share * (1 - share) / variance, 1.0), records)


def _wilson_error(share: float, drawn: float, windows_seen: int) -> float:
    """The farther end of Wilson's interval of 95 %, which is wide where few or all were found."""
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
    """Of Student's distribution, to within 3 %: a few windows tell little about how much windows differ."""
    return _NORMAL_95 + 2.5 / freedom + 8 / freedom**3


# For people


def display_key(key: bytes) -> str:
    """As text where it is some, cut where it is long."""
    text = key.decode(errors="backslashreplace")
    printable = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return (
        printable if len(printable) <= _KEY_CHARACTERS_MAX else printable[: _KEY_CHARACTERS_MAX - 3] + "..."
    )


def salting_advice(hot: int) -> str | None:
    """What to do about so many hot keys."""
    if not hot:
        return None
    return (
        f"keys with a quarter of their partition or more: {hot}. penstock.client.salting spreads a key, "
        "at the price of the order of its records"
    )


#: A window needs few bytes, and what is behind it is sent in vain.
_WINDOW_BYTES_MIN: Final = 16 << 10
_WINDOW_BYTES_MAX: Final = 1 << 20
_RECORD_BYTES_ASSUMED: Final = 256
#: Of a partition that is read as a whole, counted at a time.
_CHUNK_RECORDS: Final = 10_000


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


def sample_keys(
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
    wanted = [
        span for span in offset_ranges(cluster, topic) if partitions is None or span.partition in partitions
    ]
    shares = sample_sizes(sample, [max(span.end - span.start, 0) for span in wanted])
    for span, share in zip(wanted, shares, strict=True):
        yield _sample_partition(
            cluster, topic, span, sample_windows(span.start, span.end, share, chance), top
        )


def _sample_partition(
    cluster: Cluster, topic: TopicInfo, span: OffsetRange, looks: list[SampleWindow], top: int
) -> PartitionKeys:
    seen = sum(window.end - window.start for window in looks)
    is_whole = seen >= span.end - span.start
    counted = KeyCounter(part=1 if is_whole else seen / (span.end - span.start))
    for window in looks:
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
    """About what so many records take."""
    return min(max(count * _RECORD_BYTES_ASSUMED, _WINDOW_BYTES_MIN), _WINDOW_BYTES_MAX)
