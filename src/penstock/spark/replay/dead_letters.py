"""Dead letters as rows: the fields of their headers, which of them were replayed, and the original records.

A dead letter is replayed in one transaction with an entry in the list of replayed dead letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from pyspark.sql import functions as F

from penstock.client.deadletters import dead_letter
from penstock.client.deadletters.headers import replayed_topic, retry_topic
from penstock.protocol import dead_letter_headers as headers
from penstock.spark.replay.request import ReplayJobRequest

#: Columns for `where=`, besides the columns of a topic.
_HEADER_COLUMNS: Final = {
    "origin_topic": (headers.TOPIC_HEADER, "string"),
    "origin_partition": (headers.PARTITION_HEADER, "int"),
    "origin_offset": (headers.OFFSET_HEADER, "bigint"),
    "origin_timestamp": (headers.TIMESTAMP_HEADER, "bigint"),
    "error_group": (headers.GROUP_HEADER, "string"),
    "handler": (headers.HANDLER_HEADER, "string"),
    "error_class": (headers.ERROR_CLASS_HEADER, "string"),
    "error_message": (headers.ERROR_MESSAGE_HEADER, "string"),
    "reason": (headers.REASON_HEADER, "string"),
    "attempts": (headers.DELIVERY_COUNT_HEADER, "int"),
    "without_record": (headers.WITHOUT_RECORD_HEADER, "string"),
}


#: A dead letter with neither key nor value was written without its record.
_EMPTY: Final = "if(key is null and value is null, 'neither key nor value', null)"


def with_header_columns(rows: Any) -> Any:
    """Add a column for each field in the headers of a dead letter."""
    columns = {name: _header_expression(*source) for name, source in _HEADER_COLUMNS.items()}
    columns["without_record"] = f"coalesce({columns['without_record']}, {_EMPTY})"
    return rows.withColumns({name: F.expr(text) for name, text in columns.items()})


def _header_expression(name: str, kind: str) -> str:
    """Return SQL for the last header of that name. It is null if the header is missing or invalid."""
    found = f"filter(headers, h -> h.key = '{name}' and h.value is not null)"
    return f"try_cast(cast(try_element_at({found}, -1).value as string) as {kind})"


def _own_headers() -> str:
    """Return SQL for the record's own headers, without those that were added when it failed."""
    ours = " or ".join(f"startswith(h.key, '{prefix}')" for prefix in headers.HEADER_PREFIXES)
    return f"filter(headers, h -> not ({ours}))"


def replayable(rows: Any) -> Any:
    """Return the dead letters that contain their record."""
    return rows.where("without_record is null")


def without_replayed(rows: Any, replayed: Any) -> Any:
    """Return the dead letters that are not in the list. The list is small, and a broadcast join keeps the order."""
    return rows.join(F.broadcast(replayed), ["partition", "offset"], "left_anti")


def replayed_offsets(rows: Any, topic_id: UUID | None) -> Any:
    """Return partition and offset of the dead letters in the list, without those of an earlier topic of that name."""
    parts = F.split(F.col("key").cast("string"), ":")
    known = F.get_json_object(F.col("value").cast("string"), f"$.{dead_letter.TOPIC_ID}")
    return (
        rows.where(known.isNull() | (known == str(topic_id)) if topic_id is not None else F.lit(True))
        .select(
            F.try_element_at(parts, F.lit(1)).try_cast("int").alias("partition"),
            F.try_element_at(parts, F.lit(2)).try_cast("bigint").alias("offset"),
        )
        .distinct()
    )


def replay_records(
    rows: Any, request: ReplayJobRequest, partitions: Mapping[str, int], topic_id: UUID | None, now_ms: int
) -> Any:
    """Return two rows for each dead letter: the original record, and the entry in the list of replayed ones."""
    target = _target(request)
    record = F.struct(
        target.alias("topic"),
        _partition(request, target, partitions).alias("partition"),
        F.col("key"),
        F.col("value"),
        F.expr(_retry_headers() if request.is_to_group else _own_headers()).alias("headers"),
        _timestamp(request, now_ms).alias("timestamp"),
    )
    replayed = F.struct(
        F.lit(replayed_topic(request.source)).alias("topic"),
        F.lit(None).cast("int").alias("partition"),
        F.concat_ws(":", "partition", "offset").cast("binary").alias("key"),
        F.to_json(_replayed_entry(request, topic_id, now_ms, target)).cast("binary").alias("value"),
        F.lit(None).cast(_HEADERS_TYPE).alias("headers"),
        F.timestamp_millis(F.lit(now_ms)).alias("timestamp"),
    )
    return rows.select(F.inline(F.array(record, replayed)))


_HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def _target(request: ReplayJobRequest) -> Any:
    if request.is_to_group:
        return F.concat(F.col("origin_topic"), F.lit(retry_topic("", 1)))
    return F.lit(request.to) if request.to is not None else F.col("origin_topic")


def _timestamp(request: ReplayJobRequest, now_ms: int) -> Any:
    """Return the timestamp. In retry topics, it is the time at which the record is due."""
    if request.is_to_group:
        return F.timestamp_millis(F.lit(now_ms))
    return F.coalesce(F.timestamp_millis("origin_timestamp"), F.col("timestamp"))


def _retry_headers() -> str:
    """Return SQL for the headers of a retry: those of the dead letter, but with no attempts yet."""
    replaced = {headers.DELIVERY_COUNT_HEADER: "0", headers.REASON_HEADER: "replayed"}
    names = ", ".join(f"'{name}'" for name in replaced)
    added = ", ".join(
        f"named_struct('key', '{name}', 'value', cast('{text}' as binary))" for name, text in replaced.items()
    )
    return f"concat(filter(headers, h -> h.key not in ({names})), array({added}))"


def _partition(request: ReplayJobRequest, target: Any, partitions: Mapping[str, int]) -> Any:
    """Return the original partition if the target has it, or null to choose the partition by the key."""
    by_key = F.lit(None).cast("int")
    if (request.to is not None and not request.is_to_group) or not partitions:
        return by_key
    counts = F.from_json(F.lit(json.dumps(dict(partitions))), "map<string,int>")
    count = F.try_element_at(counts, target)
    if request.is_to_group:
        return F.col("origin_partition") % count
    exists = (F.col("origin_partition") >= 0) & (F.col("origin_partition") < count)
    return F.when(exists, F.col("origin_partition")).otherwise(by_key)


def _replayed_entry(request: ReplayJobRequest, topic_id: UUID | None, now_ms: int, target: Any) -> Any:
    """Return the value of the entry in the list of replayed dead letters."""
    return F.struct(
        F.lit(now_ms).alias(dead_letter.AT),
        F.lit(request.id).alias(dead_letter.REPLAY),
        target.alias(dead_letter.TO),
        F.lit(str(topic_id) if topic_id is not None else None).alias(dead_letter.TOPIC_ID),
    )
