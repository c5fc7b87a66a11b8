"""What a replay reads: the offsets that there are now, and the rows of some of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.client.cluster import Cluster
from penstock.client.grouping import by_topic
from penstock.client.metadata import Place
from penstock.spark.batch_source import planned
from penstock.spark.narrowing import Narrowing
from penstock.spark.offsets import OffsetRange
from penstock.spark.options import SourceOptions
from penstock.spark.replay.request import Request
from penstock.spark.schemas import table_schema

_COMMITTED = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}


def pinned(cluster: Cluster, request: Request, options: Mapping[str, str]) -> list[OffsetRange]:
    """The offsets of a topic that are asked for, up to its end at this moment. Raises OptionError, DataLoss."""
    given = {**options, **_COMMITTED, "subscribe": request.source}
    given |= {"startingOffsets": request.starting, "endingOffsets": request.ending}
    if request.since_ms is not None:
        given |= {
            "startingTimestamp": str(request.since_ms),
            # Nothing that late is nothing to replay.
            "startingOffsetsByTimestampStrategy": "latest",
        }
    if request.until_ms is not None:
        given["endingTimestamp"] = str(request.until_ms)
    return planned(cluster, SourceOptions.parse(given, streaming=False), Narrowing())


def topic_rows(
    spark: Any, cluster: Cluster, ranges: Iterable[OffsetRange], options: Mapping[str, str]
) -> Any:
    """A DataFrame with one task for each range, so that the order within partitions is kept. Raises TopicChanged."""
    wanted = list(ranges)
    if not wanted:
        return spark.createDataFrame([], table_schema(include_headers=True))
    for topic, topic_id in {each.topic: each.topic_id for each in wanted}.items():
        cluster.await_topic(topic, topic_id)
    given = {
        **options,
        **_COMMITTED,
        "assign": _partitions(wanted),
        "startingOffsets": _offsets({each.place: each.start for each in wanted}),
        "endingOffsets": _offsets({each.place: each.end for each in wanted}),
    }
    return spark.read.format("penstock").options(**given).load()


def _partitions(wanted: Iterable[OffsetRange]) -> str:
    found = by_topic((each.place, None) for each in wanted)
    return json.dumps({topic: [part for part, _ in parts] for topic, parts in found.items()})


def _offsets(offsets: Mapping[Place, int]) -> str:
    found = by_topic(offsets.items())
    return json.dumps({topic: {str(part): at for part, at in parts} for topic, parts in found.items()})


def in_time(rows: Any, request: Request, column: str = "timestamp") -> Any:
    """Less what is older or younger, which lies between the others where clocks of publishers differ."""
    from pyspark.sql import functions as F

    moment = F.unix_millis(F.col(column))
    if request.since_ms is not None:
        rows = rows.where(moment >= request.since_ms)
    if request.until_ms is not None:
        rows = rows.where(moment < request.until_ms)
    return rows
