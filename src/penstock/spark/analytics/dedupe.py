"""A topic without the messages that came before, known by their ids.

Spark forgets ids as time goes on, and drops what is older than what it has forgotten. Timestamps are what publishers
say, so a record must not be lost for its own, nor make others late: here time is that of the record, but never after
the moment in which its batch began, nor longer before it than ids are remembered. So nothing is ever too late, and an
id is remembered for at least that long after it was read.
"""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.client.letters import MESSAGE_ID
from penstock.spark.pipelines.declaration import Pipeline, PipelineError, Source, pipeline

_HEADER: Final = "header:"
_ID: Final = "_message_id"
_MOMENT: Final = "_moment"
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
    """Copy a topic, less records whose id was read before within the watermark; those without an id are all kept.

    `by` is `header:NAME`, or SQL over the columns of the topic, such as `key`. Raises PipelineError.
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
    return declare(lambda rows: without_repeats(rows, by, watermark))


def without_repeats(rows: Any, by: str, watermark: str) -> Any:
    from pyspark.sql import functions as F

    named = rows.withColumn(_ID, F.coalesce(_known(by), _unknown()))
    timed = named.withColumn(_MOMENT, _moment(watermark)).withWatermark(_MOMENT, watermark)
    return timed.dropDuplicatesWithinWatermark([_ID]).select("key", "value", "headers")


def _known(by: str) -> Any:
    """What makes it the same message, as text that no record without an id has."""
    from pyspark.sql import functions as F

    if not by.startswith(_HEADER):
        return F.concat(F.lit("id "), F.expr(f"cast(({by}) as string)"))
    found = F.filter("headers", lambda header: header["key"] == by.removeprefix(_HEADER))
    return F.concat(F.lit("id "), F.hex(F.try_element_at(found, F.lit(-1))["value"]))


def _unknown() -> Any:
    """Something that no other record has."""
    from pyspark.sql import functions as F

    return F.concat_ws(" ", F.lit("at"), F.col("topic"), F.col("partition"), F.col("offset"))


def _moment(watermark: str) -> Any:
    from pyspark.sql import functions as F

    now = F.current_timestamp()
    return F.greatest(F.least(F.col("timestamp"), now), now - F.expr(f"interval {watermark}"))
