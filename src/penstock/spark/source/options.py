"""The options of the source, with the names of Spark's own Kafka connector. Pure: it connects to no broker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST
from penstock.client.wire.settings import ConnectionSettings
from penstock.spark.option_reader import (
    OptionError,
    OptionReader,
    assigned_partitions,
    invalid_option,
    numbers_by_partition,
)
from penstock.spark.sink.options import CONTRACTS, Contract

_SUBSCRIPTIONS: Final = ("subscribe", "subscribePattern", "assign")
#: Options of Spark's connector about how it fetches. They have no effect here.
_IGNORED_OPTIONS: Final = (
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
)
_ENDINGS: Final = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
SOURCE_OPTIONS: Final = (
    *_SUBSCRIPTIONS,
    *_IGNORED_OPTIONS,
    *_ENDINGS,
    "contract",
    "failOnDataLoss",
    "includeHeaders",
    "kafka.bootstrap.servers",
    "kafka.group.id",
    "kafka.isolation.level",
    "maxOffsetsPerTrigger",
    "maxRecordsPerPartition",
    "maxTriggerDelay",
    "minOffsetsPerTrigger",
    "minPartitions",
    "readWhenDue",
    "startingOffsets",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "startingTimestamp",
)
_EDGES: Final = {"earliest": EARLIEST, "latest": LATEST}
_ISOLATIONS: Final = {each.name.lower(): each for each in IsolationLevel}
_TRIGGER_DELAY_MS: Final = 15 * 60_000
#: Consumer settings that would conflict with how the source works.
_REFUSED_SETTINGS: Final = {
    "auto.offset.reset": "use startingOffsets",
    "enable.auto.commit": "a query commits the end of each finished batch",
    "key.deserializer": "keys are binary; convert them with Spark functions",
    "value.deserializer": "values are binary; convert them with Spark functions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """Topics by name, topics whose whole name matches a pattern, or single partitions: one of the three."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()

    def names_topic(self, topic: str) -> bool:
        """Return whether a topic of this name would be read."""
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.names or any(topic == name for name, _ in self.assigned)


@dataclass(frozen=True, slots=True)
class AtEdge:
    edge: int  # EARLIEST or LATEST


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset, EARLIEST or LATEST for every partition."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first offset at or after a timestamp: one for all partitions, or one for each."""

    timestamps_ms: int | Mapping[TopicPartition, int]
    option: str
    #: If no record is that late: use the end of the log, or fail.
    or_latest: bool


OffsetBound = AtEdge | AtOffsets | AtTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    connection: ConnectionSettings
    subscription: Subscription
    start: OffsetBound
    end: OffsetBound = AtEdge(LATEST)
    #: Spark's own connector reads uncommitted records too.
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    group_id: str | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    partitions_min: int | None = None
    partition_records_max: int | None = None
    trigger_offsets_max: int | None = None
    trigger_offsets_min: int | None = None
    trigger_delay_ms_max: int = _TRIGGER_DELAY_MS
    #: In these topics, a record whose timestamp is in the future is not read yet, nor are the records after it.
    due_topics: tuple[str, ...] = ()
    contract: Contract = Contract.AT_LEAST_ONCE

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Parse the options. Raises OptionError, which names the option."""
        given = OptionReader(options)
        subscription = _subscription(given)
        group_id = given.text("kafka.group.id")
        parsed = cls(
            isolation=given.choice("kafka.isolation.level", _ISOLATIONS, IsolationLevel.READ_COMMITTED),
            connection=given.connection(_REFUSED_SETTINGS),
            subscription=subscription,
            start=_start(given, streaming=streaming),
            end=_end(given, streaming=streaming),
            group_id=group_id or None,
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            include_headers=given.flag("includeHeaders", default=False),
            partitions_min=given.number("minPartitions"),
            partition_records_max=given.number("maxRecordsPerPartition"),
            trigger_offsets_max=given.number("maxOffsetsPerTrigger"),
            trigger_offsets_min=given.number("minOffsetsPerTrigger"),
            trigger_delay_ms_max=given.duration_ms("maxTriggerDelay", default_ms=_TRIGGER_DELAY_MS),
            due_topics=_due_topics(given, subscription, streaming=streaming),
            contract=_contract(given, group_id, streaming=streaming),
        )
        for name in _IGNORED_OPTIONS:
            given.text(name)
        given.refuse_unknown(SOURCE_OPTIONS)
        least, most = parsed.trigger_offsets_min, parsed.trigger_offsets_max
        if least is not None and most is not None and least > most:
            raise invalid_option(
                "minOffsetsPerTrigger", least, f"must not be more than maxOffsetsPerTrigger={most}"
            )
        return parsed


# Topics


def _subscription(given: OptionReader) -> Subscription:
    values = {name: value for name in _SUBSCRIPTIONS if (value := given.text(name))}
    if len(values) != 1:
        known = ", ".join(_SUBSCRIPTIONS)
        raise OptionError(
            f"exactly one of the options {known} is needed (given: {', '.join(values) or 'none'})"
        )
    ((name, text),) = values.items()
    match name:
        case "subscribe":
            names = tuple(sorted({part.strip() for part in text.split(",") if part.strip()}))
            if not names:
                raise invalid_option(name, text, "contains no topic")
            return Subscription(names=names)
        case "subscribePattern":
            try:
                re.compile(text)
            except re.error as flaw:
                raise invalid_option(name, text, f"is not a regular expression ({flaw})") from None
            return Subscription(pattern=text)
        case _:
            return Subscription(assigned=assigned_partitions(name, text))


def _due_topics(given: OptionReader, read: Subscription, *, streaming: bool) -> tuple[str, ...]:
    text = given.text("readWhenDue") or ""
    names = tuple(sorted({part.strip() for part in text.split(",") if part.strip()}))
    if names and not streaming:
        raise OptionError("option readWhenDue is for streams: a batch read does not wait for records")
    for name in names:
        if not read.names_topic(name):
            raise invalid_option("readWhenDue", text, f"{name} is not among the topics that are read")
    return names


# Delivery contract


def _contract(given: OptionReader, group_id: str | None, *, streaming: bool) -> Contract:
    """Parse the contract. An exactly-once sink needs a source that delivers at least once."""
    asked = given.choice("contract", CONTRACTS, Contract.AT_LEAST_ONCE)
    if asked is Contract.AT_MOST_ONCE and not streaming:
        raise invalid_option(
            "contract", asked.value, "is for streams: a batch read reads its whole range every time"
        )
    if asked is Contract.AT_MOST_ONCE and not group_id:
        raise invalid_option(
            "contract", asked.value, "needs kafka.group.id, the group that commits the delivered offsets"
        )
    return asked


# Start and end


def _start(given: OptionReader, *, streaming: bool) -> OffsetBound:
    or_latest = given.choice(
        "startingOffsetsByTimestampStrategy", {"error": False, "latest": True}, default=False
    )
    bound = _bound(given, "starting", default=LATEST if streaming else EARLIEST, or_latest=or_latest)
    if not streaming and LATEST in _edges_of(bound):
        raise invalid_option("startingOffsets", "latest", "a batch read that starts at the end reads nothing")
    return bound


def _end(given: OptionReader, *, streaming: bool) -> OffsetBound:
    if streaming:
        for name in _ENDINGS:
            if given.text(name) is not None:
                raise OptionError(f"option {name} is for batch reads: a stream has no end")
    bound = _bound(given, "ending", default=LATEST, or_latest=True)
    if EARLIEST in _edges_of(bound):
        raise invalid_option(
            "endingOffsets", "earliest", "a batch read that ends at the beginning reads nothing"
        )
    return bound


def _bound(given: OptionReader, side: str, *, default: int, or_latest: bool) -> OffsetBound:
    """Parse a bound. A timestamp for all partitions overrides timestamps by partition, which override offsets."""
    for_all = given.number(f"{side}Timestamp", at_least=0)
    by_time, by_offset = given.text(f"{side}OffsetsByTimestamp"), given.text(f"{side}Offsets")
    if for_all is not None:
        return AtTime(for_all, f"{side}Timestamp", or_latest)
    if by_time is not None:
        name = f"{side}OffsetsByTimestamp"
        return AtTime(numbers_by_partition(name, by_time, least=0), name, or_latest)
    if by_offset is None:
        return AtEdge(default)
    if by_offset.lower() in _EDGES:
        return AtEdge(_EDGES[by_offset.lower()])
    if not by_offset.startswith("{"):
        raise invalid_option(f"{side}Offsets", by_offset, 'must be earliest, latest, or {"topic": {"0": 23}}')
    return AtOffsets(numbers_by_partition(f"{side}Offsets", by_offset, least=EARLIEST))


def _edges_of(bound: OffsetBound) -> set[int]:
    match bound:
        case AtEdge(edge):
            return {edge}
        case AtOffsets(offsets):
            return {each for each in offsets.values() if each < 0}
        case _:
            return set()
