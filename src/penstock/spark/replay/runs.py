"""The two ways of a replay: what is replayed as often as it is asked for, and dead letters, which are replayed once."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from penstock.client.cluster import Cluster
from penstock.client.deadletters.reading import await_rest
from penstock.client.deadletters.topics import ensure_list
from penstock.client.deadletters.turns import turn_query
from penstock.client.letters import retry_topic
from penstock.spark.archive.columns import TIMESTAMP
from penstock.spark.concluding import settle
from penstock.spark.decisions import Ledger, MicroBatch
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.counts import Tally
from penstock.spark.pipelines.jobs import JobContext
from penstock.spark.replay import archives, dead_letters, turns
from penstock.spark.replay.chunks import offsets_for
from penstock.spark.replay.outlets import filtered, to_topic, write_once
from penstock.spark.replay.plans import Plan, agreed
from penstock.spark.replay.request import ReplayError, Request
from penstock.spark.replay.sources import in_time, pinned, topic_rows


class RangeCourse:
    """A range of a topic or an archive. The plan is on the board, and every piece is a batch of the sink."""

    def __init__(self, cluster: Cluster, request: Request, context: JobContext) -> None:
        self._cluster = cluster
        self._request = request
        self._spark = context.spark
        self._options = context.run.options()
        self._query = f"replay-{request.id}"
        filtered(self._rows([]), request.where)
        self.plan, is_known = self._agree()
        # What a predecessor has decided is finished, and what it has left behind is aborted.
        settle(cluster, self._query)
        with Ledger(cluster, self._query) as ledger:
            last = ledger.last_batch()
        self.first = 0 if last is None else last + 1
        if is_known and self.first:
            context.note(_told_of(request, self.first, self.plan.pieces))

    def _agree(self) -> tuple[Plan, bool]:
        board = Board(self._cluster)
        try:
            return agreed(board, self._request, self._make)
        finally:
            board.close()

    def _make(self) -> Plan:
        ranges = tuple(self._pinned())
        return Plan(ranges=ranges, offsets_max=offsets_for(self._request.rate_per_s))

    def _pinned(self) -> list[OffsetRange]:
        return pinned(self._cluster, self._request, self._options)

    def _rows(self, ranges: list[OffsetRange]) -> Any:
        return topic_rows(self._spark, self._cluster, ranges, self._options)

    def _records(self, ranges: list[OffsetRange]) -> Any:
        rows = in_time(self._rows(ranges), self._request)
        return filtered(rows, self._request.where)

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        counted = Tally.of_rows(self._records(ranges))
        batch = MicroBatch(self._query, index)
        write_once(to_topic(counted.frame, self._request), batch, self._options, self._request)
        return counted.found().get("rows", 0)

    def close(self) -> None:
        """Nothing is held."""


class ArchiveCourse(RangeCourse):
    """The same for a Delta table that an archive is kept in; rows are known by the offsets that they had."""

    def __init__(self, cluster: Cluster, request: Request, context: JobContext) -> None:
        self._archive = archives.archive(request.source)
        if archives.holds_columns(self._archive):
            context.note(f"{request.source} holds columns: values are written as JSON of them")
        super().__init__(cluster, request, context)

    def _pinned(self) -> list[OffsetRange]:
        return archives.spanned(self._wanted(archives.archived(self._spark, self._archive)), self._archive)

    def _rows(self, ranges: list[OffsetRange]) -> Any:
        return archives.archived(self._spark, self._archive, ranges)

    def _wanted(self, rows: Any) -> Any:
        return filtered(in_time(rows, self._request, TIMESTAMP), self._request.where)

    def _records(self, ranges: list[OffsetRange]) -> Any:
        return archives.as_records(self._wanted(self._rows(ranges)), self._archive)


def _told_of(request: Request, first: int, pieces: int) -> str:
    if first >= pieces:
        return f"replay {request.id} is done already: give it another id= to do it again"
    return f"replay {request.id} goes on after {first} of {pieces} pieces"


class LettersCourse:
    """Dead letters that were not replayed before, by whatever replay. Every run plans anew what is left."""

    first = 0

    def __init__(self, cluster: Cluster, request: Request, context: JobContext) -> None:
        self._cluster = cluster
        self._request = request
        self._context = context
        self._options = context.run.options()
        self._query = turn_query(request.source)
        topic = cluster.await_topic(request.source)
        self._topic_id: UUID | None = topic.id
        ranges = tuple(pinned(cluster, request, self._options))
        self.plan = Plan(ranges=ranges, offsets_max=offsets_for(request.rate_per_s))
        self._told(list(ranges))
        self._list = ensure_list(cluster, topic)
        self._before = turns.begin(cluster, self._query)
        self._replayed = self._read_list()
        self._partitions = self._targets(list(ranges))

    def _read_list(self) -> Any:
        """Of letters that were replayed before this run, whose own need not be looked for."""
        ends = await_rest(self._cluster, [(self._list.name, p.index) for p in self._list.partitions])
        ranges = [
            OffsetRange(topic, self._list.id, partition, 0, end) for (topic, partition), end in ends.items()
        ]
        rows = topic_rows(self._context.spark, self._cluster, [r for r in ranges if r.size], self._options)
        return dead_letters.as_replayed(rows, self._topic_id).persist()

    def _told(self, ranges: list[OffsetRange]) -> Any:
        """Letters with what they tell, less those that are not asked for. Raises ReplayError."""
        rows = topic_rows(self._context.spark, self._cluster, ranges, self._options)
        return filtered(dead_letters.told(in_time(rows, self._request)), self._request.where)

    def _waiting(self, ranges: list[OffsetRange]) -> Any:
        return dead_letters.not_among(self._told(ranges), self._replayed)

    def _targets(self, ranges: list[OffsetRange]) -> dict[str, int]:
        """The partitions of all topics that letters go to. Raises ReplayError where one does not exist."""
        from pyspark.sql import functions as F

        found = (
            self._waiting(ranges)
            .groupBy("origin_topic")
            .agg(
                F.count_if(F.col("without_record").isNull()).alias("letters"),
                F.count_if(F.col("without_record").isNotNull()).alias("bare"),
            )
        )
        rows = found.collect()
        self._tell_left_out(rows)
        origins = sorted(row["origin_topic"] for row in rows if row["origin_topic"] and row["letters"])
        if self._request.is_to_group:
            return self._retry_topics(origins)
        if self._request.to is not None:
            return {}
        there = self._cluster.topics(origins)
        missing = [name for name in origins if name not in there]
        if missing:
            raise ReplayError(
                f"letters of {self._request.source} are from topics that do not exist: {', '.join(missing)}; "
                "name another with to=, or leave them out with where="
            )
        return {name: len(topic.partitions) for name, topic in there.items()}

    def _retry_topics(self, origins: list[str]) -> dict[str, int]:
        wanted = [retry_topic(name, 1) for name in origins]
        there = self._cluster.topics(wanted)
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ReplayError(
                f"nobody retries there, so that to=group finds no one: {', '.join(missing)} does not exist; "
                "leave to= out to send them to the topic that they are from"
            )
        return {name: len(topic.partitions) for name, topic in there.items()}

    def _tell_left_out(self, rows: list[Any]) -> None:
        bare = sum(row["bare"] for row in rows)
        if bare:
            self._context.note(f"{bare} letters have no record in them, and are left out")
        strays = sum(row["letters"] for row in rows if row["origin_topic"] is None)
        if strays and (self._request.to is None or self._request.is_to_group):
            self._context.note(
                f"{strays} records do not tell where they are from, and are left out without to="
            )

    def write(self, index: int, ranges: list[OffsetRange]) -> int:
        waiting = dead_letters.replayable(self._waiting(ranges))
        if self._request.to is None or self._request.is_to_group:
            waiting = waiting.where("origin_topic is not null")
        if self._request.is_to_group:
            waiting = waiting.where("error_group is not null")
        counted = Tally.of_rows(waiting)
        now_ms = int(time.time() * 1000)
        out = dead_letters.restored(counted.frame, self._request, self._partitions, self._topic_id, now_ms)
        batch = MicroBatch(self._query, self._before + 1 + index)
        write_once(out, batch, self._options, self._request)
        turns.check(self._cluster, batch)
        return counted.found().get("rows", 0)

    def close(self) -> None:
        self._replayed.unpersist()
