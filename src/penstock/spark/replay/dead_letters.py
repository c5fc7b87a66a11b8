"""Dead letters as rows: what their headers say, which were replayed before, and the original records.

A dead letter that is replayed is written in one transaction with a record in the list of replayed dead letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from penstock.client.deadletters import dead_letter
from penstock.client.deadletters.headers import replayed_topic, retry_topic
from penstock.protocol import dead_letter_headers as headers
from penstock.spark.replay.request import ReplayJobRequest

#: What `where=` may ask for, besides the columns of a topic.
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


#: A letter with neither key nor value was written without its record.
_EMPTY: Final = "if(key is null and value is null, 'neither key nor value', null)"


def with_header_columns(rows: Any) -> Any:
    """With a column for each thing that the headers of a letter tell."""
    from pyspark.sql import functions as F

    columns = {name: _header_expression(*source) for name, source in _HEADER_COLUMNS.items()}
    columns["without_record"] = f"coalesce({columns['without_record']}, {_EMPTY})"
    return rows.withColumns({name: F.expr(text) for name, text in columns.items()})


def _header_expression(name: str, kind: str) -> str:
    """The last one of that name; null for what is absent or makes no sense."""
    found = f"filter(headers, h -> h.key = '{name}' and h.value is not null)"
    return f"try_cast(cast(try_element_at({found}, -1).value as string) as {kind})"


def _own_headers() -> str:
    """The record's own, as they were before it failed."""
    ours = " or ".join(f"startswith(h.key, '{prefix}')" for prefix in headers.HEADER_PREFIXES)
    return f"filter(headers, h -> not ({ours}))"


def replayable(rows: Any) -> Any:
    """Those that brought their record along."""
    return rows.where("without_record is null")


def without_replayed(rows: Any, replayed: Any) -> Any:
    """The list is small beside the letters, and rows that do not have to meet stay in their order."""
    from pyspark.sql import functions as F

    return rows.join(F.broadcast(replayed), ["partition", "offset"], "left_anti")


def replayed_offsets(rows: Any, topic_id: UUID | None) -> Any:
    """Partition and offset of the letters that the list names, of this topic and no earlier one of its name."""
    from pyspark.sql import functions as F

    place = F.split(F.col("key").cast("string"), ":")
    known = F.get_json_object(F.col("value").cast("string"), f"$.{dead_letter.TOPIC_ID}")
    return (
        rows.where(known.isNull() | (known == str(topic_id)) if topic_id is not None else F.lit(True))
        .select(
            F.try_element_at(place, F.lit(1)).try_cast("int").alias("partition"),
            F.try_element_at(place, F.lit(2)).try_cast("bigint").alias("offset"),
        )
        .distinct()
    )


def replay_records(
    rows: Any, request: ReplayJobRequest, partitions: Mapping[str, int], topic_id: UUID | None, now_ms: int
) -> Any:
    """Two rows for each letter: the record as it was once, and that it was replayed."""
    from pyspark.sql import functions as F

    target = _target(request)
    record = F.struct(
        target.alias("topic"),
        _partition(request, target, partitions).alias("partition"),
        F.col("key"),
        F.col("value"),
        F.expr(_retry_headers() if request.is_to_group else _own_headers()).alias("headers"),
        _timestamp(request, now_ms).alias("timestamp"),
    )
    mark = F.struct(
        F.lit(replayed_topic(request.source)).alias("topic"),
        F.lit(None).cast("int").alias("partition"),
        F.concat_ws(":", "partition", "offset").cast("binary").alias("key"),
        F.to_json(_replayed_mark(request, topic_id, now_ms, target)).cast("binary").alias("value"),
        F.lit(None).cast(_HEADERS_TYPE).alias("headers"),
        F.timestamp_millis(F.lit(now_ms)).alias("timestamp"),
    )
    return rows.select(F.inline(F.array(record, mark)))


_HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def _target(request: ReplayJobRequest) -> Any:
    from pyspark.sql import functions as F

    if request.is_to_group:
        return F.concat(F.col("origin_topic"), F.lit(retry_topic("", 1)))
    return F.lit(request.to) if request.to is not None else F.col("origin_topic")


def _timestamp(request: ReplayJobRequest, now_ms: int) -> Any:
    """In retry topics it says when a record is due."""
    from pyspark.sql import functions as F

    if request.is_to_group:
        return F.timestamp_millis(F.lit(now_ms))
    return F.coalesce(F.timestamp_millis("origin_timestamp"), F.col("timestamp"))


def _retry_headers() -> str:
    """All that it tells stays with it until it fails again; its attempts count anew."""
    anew = {headers.DELIVERY_COUNT_HEADER: "0", headers.REASON_HEADER: "replayed"}
    names = ", ".join(f"'{name}'" for name in anew)
    told = ", ".join(
        f"named_struct('key', '{name}', 'value', cast('{text}' as binary))" for name, text in anew.items()
    )
    return f"concat(filter(headers, h -> h.key not in ({names})), array({told}))"


def _partition(request: ReplayJobRequest, target: Any, partitions: Mapping[str, int]) -> Any:
    """The one that it was in, if that is still there; else, and in another topic, that of its key."""
    from pyspark.sql import functions as F

    nowhere = F.lit(None).cast("int")
    if (request.to is not None and not request.is_to_group) or not partitions:
        return nowhere
    counts = F.from_json(F.lit(json.dumps(dict(partitions))), "map<string,int>")
    count = F.try_element_at(counts, target)
    if request.is_to_group:
        return F.col("origin_partition") % count
    is_there = (F.col("origin_partition") >= 0) & (F.col("origin_partition") < count)
    return F.when(is_there, F.col("origin_partition")).otherwise(nowhere)


def _replayed_mark(request: ReplayJobRequest, topic_id: UUID | None, now_ms: int, target: Any) -> Any:
    """What the list tells of a letter."""
    from pyspark.sql import functions as F

    return F.struct(
        F.lit(now_ms).alias(dead_letter.AT),
        F.lit(request.id).alias(dead_letter.REPLAY),
        target.alias(dead_letter.TO),
        F.lit(str(topic_id) if topic_id is not None else None).alias(dead_letter.TOPIC_ID),
    )
