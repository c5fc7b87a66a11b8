"""Rows of a query as records: which columns they come from, which partition each goes to, and what its topic accepts.

The limits of a topic are checked before anything is sent, so that a record which a broker would refuse fails with an
error that says why. Spark imports this module also in workers that only plan; so the functions that run in tasks import
pyarrow, numpy and the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.client.deadletters.topics import MESSAGE_BYTES_SETTING
from penstock.client.errors import ClientError, Refused, UnsupportedVersion
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import topic_settings
from penstock.protocol.errors import ErrorCode
from penstock.spark.option_reader import OptionError

if TYPE_CHECKING:
    import pyarrow as pa


_TEXT: Final = ("string", "binary")
#: The types that each column may have, by the names and types of Spark's Kafka connector.
_TYPES: Final = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}
#: The name here of the column that the option timestampColumn names.
_TIMESTAMP: Final = "timestamp"
_RECORD_COLUMNS: Final = ("key", "value", "headers", _TIMESTAMP)
#: Rows are combined to about this size before they are split by partition, so that record batches do not become small.
_ROWS_WANTED: Final = 1 << 16
_BYTES_WANTED: Final = 8 << 20


class WrongRow(ClientError):
    """A row cannot be written: its topic or partition does not exist, or the topic does not accept the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkColumns:
    """The positions of the record's columns in a row. Other columns are ignored."""

    positions: dict[str, int]
    topic: str | None

    @classmethod
    def of(cls, schema: Any, topic: str | None, timestamp_column: str | None = None) -> SinkColumns:
        """Find the columns. Raises OptionError if one is missing, or has a type that cannot be written."""
        positions = {}
        for position, field in enumerate(schema.fields):
            name, kind = field.name.lower(), field.dataType.simpleString()
            if name not in _TYPES:
                continue
            # The type may end with a collation, which does not change what is written.
            if kind.split(" collate ")[0] not in _TYPES[name]:
                wanted = " or ".join(_TYPES[name])
                raise OptionError(f"column {field.name} is {kind}; it must be {wanted} to be written")
            positions[name] = position
        if "value" not in positions:
            raise OptionError("there is no column value; it contains what is written, as string or binary")
        if topic is None and "topic" not in positions:
            raise OptionError("no topic to write to: set the option topic, or add a column topic")
        if timestamp_column is not None:
            positions[_TIMESTAMP] = _timestamp_position(schema, timestamp_column)
        return cls(positions=positions, topic=topic)

    def column(self, rows: pa.RecordBatch, name: str) -> pa.Array | None:
        return rows.column(self.positions[name]) if name in self.positions else None

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return key, value, headers and timestamp, as `columns.encode` takes them."""
        import pyarrow as pa

        found = {name: self.column(rows, name) for name in _RECORD_COLUMNS}
        return pa.RecordBatch.from_pydict({name: each for name, each in found.items() if each is not None})


def _timestamp_position(schema: Any, name: str) -> int:
    for position, field in enumerate(schema.fields):
        if field.name.lower() == name.lower():
            kind = field.dataType.simpleString()
            if kind != "timestamp":
                raise OptionError(f"column {field.name} is {kind}; timestampColumn must name a timestamp")
            return position
    raise OptionError(f"option timestampColumn={name}: there is no such column")


def combine_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in larger batches. No batch is empty."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        size = sum(int(each.nbytes) for each in held)
        if sum(each.num_rows for each in held) >= _ROWS_WANTED or size >= _BYTES_WANTED:
            yield _concatenated(held)
            held = []
    if held:
        yield _concatenated(held)


def _concatenated(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    return held[0] if len(held) == 1 else pa.concat_batches(held)


def records_by_partition(
    rows: pa.RecordBatch,
    columns: SinkColumns,
    partition_count: Callable[[str], int],
    *,
    seed: int,
) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
    """Yield the records of each partition. A row without a partition goes by its key, or by `seed` if it has no key.

    Raises WrongRow, and the errors of `partition_count`.
    """
    from penstock.spark.columns import split_by_partition

    for topic, those in _rows_by_topic(rows, columns):
        partitions = _partitions_of_rows(those, columns, topic, partition_count(topic), seed)
        for partition, records in split_by_partition(columns.records(those), partitions).items():
            yield (topic, partition), records


def _rows_by_topic(rows: pa.RecordBatch, columns: SinkColumns) -> Iterator[tuple[str, pa.RecordBatch]]:
    import pyarrow.compute as pc

    column = columns.column(rows, "topic")
    if columns.topic is not None or column is None:
        assert columns.topic is not None, f"{columns} name no topic"
        yield columns.topic, rows
        return
    if column.null_count:
        raise WrongRow("a row has no topic: set the option topic, or fill the column")
    names = pc.unique(column).to_pylist()
    for name in names:
        yield name, rows if len(names) == 1 else rows.filter(pc.equal(column, name))


def _partitions_of_rows(rows: pa.RecordBatch, columns: SinkColumns, topic: str, count: int, seed: int) -> Any:
    import numpy as np

    given = columns.column(rows, "partition")
    if given is None or given.null_count == len(given):
        return _partitions_by_key(rows, columns, count, seed)
    numbers = given.fill_null(-1).to_numpy(zero_copy_only=False)
    is_null = given.is_null().to_numpy(zero_copy_only=False)
    wrong = (~is_null) & ((numbers < 0) | (numbers >= count))
    if wrong.any():
        number = numbers[np.flatnonzero(wrong)[0]]
        raise WrongRow(f"a row is for partition {number} of {topic}, which has {count} partitions")
    return (
        np.where(is_null, _partitions_by_key(rows, columns, count, seed), numbers)
        if is_null.any()
        else numbers
    )


def _partitions_by_key(rows: pa.RecordBatch, columns: SinkColumns, count: int, seed: int) -> Any:
    import numpy as np

    from penstock.spark.columns import partition_rows

    keys = columns.column(rows, "key")
    if keys is None:
        return np.full(rows.num_rows, seed % count, np.int32)
    return partition_rows(keys, count, seed=seed)


#: A batch must fit into a segment too.
_SIZE_SETTINGS: Final = (MESSAGE_BYTES_SETTING, "segment.bytes")
_CLEANUP_SETTING: Final = "cleanup.policy"
_LIMITS_AGE_MS_MAX: Final = 60_000


class RecordTooLarge(WrongRow):
    """The record is larger than its topic accepts."""


class TopicLimits(NamedTuple):
    #: The largest batch, as it is sent. None if brokers do not report it.
    bytes_max: int | None = None
    #: The setting that the limit comes from.
    bytes_setting: str = MESSAGE_BYTES_SETTING
    needs_keys: bool = False


#: The limits that this process knows. They are read again after `_LIMITS_AGE_MS_MAX`.
_KNOWN_LIMITS: Final[dict[ConnectionSettings, tuple[dict[str, TopicLimits], Deadline]]] = {}


class LimitChecker:
    """Checks records against the limits of the topics that a task writes to.

    Limits may be out of date, so they are read again before a row is refused.
    """

    def __init__(self, cluster: Cluster, *, use_cache: bool = True) -> None:
        self._cluster = cluster
        self._known = _known_limits(cluster.settings) if use_cache else {}

    def partition_count(self, topic: str) -> int:
        """Raises WrongRow if the topic's name is invalid; Refused, Unavailable."""
        try:
            found = self._cluster.topic_to_write(topic)
        except Refused as error:
            if error.code is not ErrorCode.invalid_topic_exception:
                raise
            raise WrongRow(
                f"{topic!r} is not a valid topic name: it must have 1 to 249 characters of A-Z, a-z, 0-9, '.', '-' and "
                "'_', and must differ from other topics in more than '.' and '_'"
            ) from None
        if found.is_internal:
            raise WrongRow(f"a row is for {topic}, which is an internal topic of the brokers")
        return len(found.partitions)

    def bytes_max(self, topic: str, wanted: int) -> int:
        """Return the largest batch to make for this topic: `wanted`, or less if the topic accepts less."""
        limit = self._of(topic).bytes_max
        return wanted if limit is None else min(wanted, limit)

    def check_keys(self, topic: str, records: pa.RecordBatch) -> None:
        """Raise WrongRow if the topic is compacted and a record has no key."""
        has_keys = "key" in records.schema.names and not records.column("key").null_count
        if has_keys or not self._of(topic).needs_keys:
            return
        if self._of_now(topic).needs_keys:
            raise WrongRow(f"a row for topic {topic} has no key, and compacted topics need keys")

    def accepts(self, topic: str, size: int) -> bool:
        """Return whether the topic accepts a batch of this size."""
        return _is_within(size, self._of(topic)) or _is_within(size, self._of_now(topic))

    def too_large(self, topic: str, size: int) -> RecordTooLarge:
        limits = self._of(topic)
        return RecordTooLarge(
            f"a record of {size} bytes is too large for topic {topic}, "
            f"which accepts at most {limits.bytes_setting}={limits.bytes_max}"
        )

    def _of(self, topic: str) -> TopicLimits:
        found = self._known.get(topic)
        return self._of_now(topic) if found is None else found

    def _of_now(self, topic: str) -> TopicLimits:
        self._known[topic] = asked = _fetch_limits(self._cluster, topic)
        return asked


def _known_limits(settings: ConnectionSettings) -> dict[str, TopicLimits]:
    known, age = _KNOWN_LIMITS.get(settings, (None, None))
    if known is None or age is None or age.is_over:
        _KNOWN_LIMITS[settings] = known, _ = {}, Deadline(_LIMITS_AGE_MS_MAX)
    return known


def _fetch_limits(cluster: Cluster, topic: str) -> TopicLimits:
    """Read the topic's limits. Raises Unavailable."""
    try:
        settings = topic_settings(cluster, topic)
    except (Refused, UnsupportedVersion):
        return TopicLimits()  # this user may not describe configs
    sizes = [(int(size), name) for name in _SIZE_SETTINGS if (size := settings.get(name))]
    policies = (settings.get(_CLEANUP_SETTING) or "").split(",")
    needs_keys = "compact" in map(str.strip, policies)
    bytes_max, setting = min(sizes, default=(None, MESSAGE_BYTES_SETTING))
    return TopicLimits(bytes_max, setting, needs_keys=needs_keys)


def _is_within(size: int, limits: TopicLimits) -> bool:
    return limits.bytes_max is None or size <= limits.bytes_max
