"""Copies a topic without duplicate messages. Duplicates are messages with the same id.

Spark keeps ids until the watermark passes them, and drops records that are older than the watermark. Producers set the
timestamps, so a wrong timestamp must neither drop its own record nor make other records late. The event time used here
is therefore the record's timestamp, limited to the range from (batch start - watermark) to batch start. As a result no
record is ever late, and Spark keeps an id for at least the watermark's duration after it was read.

Functions import pyspark themselves, because a command that lists pipelines imports this module.
"""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.client.deadletters.headers import MESSAGE_ID
from penstock.spark.pipelines.declaration import Pipeline, PipelineError, Source, pipeline

_HEADER: Final = "header:"
_ID: Final = "_message_id"
_EVENT_TIME: Final = "_event_time"
_DURATION: Final = re.compile(r"\d+ (second|minute|hour|day)s?")


def dedupe(
    source: str,
    sink: str,
    by: str = _HEADER + MESSAGE_ID,
    watermark: str = "10 minutes",
    starting: str = "earliest",
    every: str = "1s",
    name: str = "",
) -> Pipeline:
    """Copy a topic, but drop records whose id was already read within the watermark. Records without an id are kept.

    `by` selects the id: `header:NAME`, or a SQL expression over the columns of the topic, such as `key`.
    Raises PipelineError.
    """
    if _DURATION.fullmatch(watermark) is None:
        raise PipelineError(f"watermark={watermark!r} must be a time such as 10 minutes")
    declare = pipeline(
        name or f"dedupe-{source}",
        source=Source(topics=(source,), starting=starting),
        sink=sink,
        delivery="exactly-once",
        every=every,
        stateful=True,
    )
    return declare(lambda rows: drop_duplicates(rows, by, watermark))


def drop_duplicates(rows: Any, by: str, watermark: str) -> Any:
    from pyspark.sql import functions as F

    named = rows.withColumn(_ID, F.coalesce(_message_id(by), _unique_id()))
    timed = named.withColumn(_EVENT_TIME, _event_time(watermark)).withWatermark(_EVENT_TIME, watermark)
    return timed.dropDuplicatesWithinWatermark([_ID]).select("key", "value", "headers")


def _message_id(by: str) -> Any:
    """Return the message id as text, with a prefix that keeps it distinct from every `_unique_id`."""
    from pyspark.sql import functions as F

    if not by.startswith(_HEADER):
        return F.concat(F.lit("id "), F.expr(f"cast(({by}) as string)"))
    found = F.filter("headers", lambda header: header["key"] == by.removeprefix(_HEADER))
    return F.concat(F.lit("id "), F.hex(F.try_element_at(found, F.lit(-1))["value"]))


def _unique_id() -> Any:
    """Return an id for a record without a message id: its topic, partition and offset."""
    from pyspark.sql import functions as F

    return F.concat_ws(" ", F.lit("at"), F.col("topic"), F.col("partition"), F.col("offset"))


def _event_time(watermark: str) -> Any:
    from pyspark.sql import functions as F

    now = F.current_timestamp()
    return F.greatest(F.least(F.col("timestamp"), now), now - F.expr(f"interval {watermark}"))
