"""Filters of a batch read that need not wait for Spark: which partitions, offsets and times can matter at all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from penstock.spark.offsets import OffsetRange

#: Never null, so that asking for what is not null asks for nothing.
_NEVER_NULL: Final = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """What all filters together leave. None leaves everything."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int | None = None
    end: int | None = None
    #: Records before this time do not matter.
    since_ms: int | None = None

    def narrowed(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """By all but the time, which only brokers can translate to offsets."""
        kept = [
            each._replace(
                start=max(each.start, self.start if self.start is not None else each.start),
                end=min(each.end, self.end if self.end is not None else each.end),
            )
            for each in ranges
            if (self.topics is None or each.topic in self.topics)
            and (self.partitions is None or each.partition in self.partitions)
        ]
        return [each for each in kept if each.size]

    def narrow(self, column: str, relation: str, value: Any) -> tuple[Narrowing, bool]:
        """With one more filter, and whether that leaves nothing of it for Spark to do."""
        if relation == "IsNotNull":
            return self, column in _NEVER_NULL
        rule = _RULES.get((column, relation))
        if rule is None or value is None:
            return self, False
        # Other records of a partition may be older than the first one that is young enough.
        return rule(self, value), column != "timestamp"


def _in_topics(narrowing: Narrowing, values: Iterable[str]) -> Narrowing:
    wanted = frozenset(values)
    return replace(narrowing, topics=wanted if narrowing.topics is None else narrowing.topics & wanted)


def _in_partitions(narrowing: Narrowing, values: Iterable[int]) -> Narrowing:
    wanted = frozenset(values)
    return replace(
        narrowing, partitions=wanted if narrowing.partitions is None else narrowing.partitions & wanted
    )


def _from(narrowing: Narrowing, start: int) -> Narrowing:
    return replace(narrowing, start=start if narrowing.start is None else max(narrowing.start, start))


def _before(narrowing: Narrowing, end: int) -> Narrowing:
    return replace(narrowing, end=end if narrowing.end is None else min(narrowing.end, end))


def _since(narrowing: Narrowing, moment: datetime) -> Narrowing:
    """Records have milliseconds and Spark microseconds: a millisecond that has only begun may still matter."""
    moment = moment if moment.tzinfo is not None else moment.astimezone()
    since_ms = (moment - _EPOCH) // _MILLISECOND
    return replace(
        narrowing, since_ms=since_ms if narrowing.since_ms is None else max(narrowing.since_ms, since_ms)
    )


_MILLISECOND: Final = datetime(1970, 1, 1, 0, 0, 0, 1000) - datetime(1970, 1, 1)
_EQUAL: Final = ("EqualTo", "EqualNullSafe")
_RULES: Final[dict[tuple[str, str], Callable[[Narrowing, Any], Narrowing]]] = {
    **{("topic", name): lambda narrowing, value: _in_topics(narrowing, [value]) for name in _EQUAL},
    ("topic", "In"): lambda narrowing, values: _in_topics(narrowing, values),
    **{("partition", name): lambda narrowing, value: _in_partitions(narrowing, [value]) for name in _EQUAL},
    ("partition", "In"): lambda narrowing, values: _in_partitions(narrowing, values),
    **{
        ("offset", name): lambda narrowing, value: _before(_from(narrowing, value), value + 1)
        for name in _EQUAL
    },
    ("offset", "GreaterThan"): lambda narrowing, value: _from(narrowing, value + 1),
    ("offset", "GreaterThanOrEqual"): lambda narrowing, value: _from(narrowing, value),
    ("offset", "LessThan"): lambda narrowing, value: _before(narrowing, value),
    ("offset", "LessThanOrEqual"): lambda narrowing, value: _before(narrowing, value + 1),
    **{
        ("timestamp", name): lambda narrowing, value: _since(narrowing, value)
        for name in (*_EQUAL, "GreaterThan", "GreaterThanOrEqual")
    },
}
