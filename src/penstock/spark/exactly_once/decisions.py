"""Which batches of a query are written for good: one record for each, decided once, whoever asks and however often.

A decision names the transactions that make up a batch. It is written under the query's own transactional id, so that
a driver which has been replaced cannot decide any more, together with a position of the group of the same name: the
position says where the record is, and its metadata for which batch. Looking that up takes one question.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock.client.batches import BatchView
from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, Fenced, OutOfRange
from penstock.client.grouping import by_topic
from penstock.client.metadata import Place
from penstock.client.positions import CommittedOffset, committed
from penstock.client.prepared import Prepared
from penstock.client.producing import RawProducer
from penstock.client.topics import NewTopic
from penstock.protocol.compression import Codec
from penstock.protocol.records import Record, encode_batch, parse_end_marker
from penstock.spark import bookkeeping

TOPIC: Final = bookkeeping.DECISIONS
_PLACE: Final[Place] = bookkeeping.place_of(TOPIC)
#: One small record for each query is kept, so segments that are compacted soon keep it short.
_NEW_TOPIC: Final = NewTopic(
    name=TOPIC,
    partitions=1,
    settings={
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.1",
        "segment.bytes": str(16 << 20),
    },
)
#: What ids of queries do not have in them.
NOT_IN_NAMES: Final = "/"
_VERSION: Final = 1


class SinkError(ClientError):
    """What was to be written exactly once cannot be."""


class MicroBatch(NamedTuple):
    """What is written as one: a batch of a streaming query, or number 0 of a write that has an id of its own."""

    query: str
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of query {self.query}"


def driver_name(query: str) -> str:
    """The transactional id of a query's decisions, and the group that says where the last one is."""
    return f"penstock-sink-{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    batch: MicroBatch
    transactions: tuple[Prepared, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.transactional_id for each in self.transactions)

    def to_bytes(self) -> bytes:
        content = {
            "version": _VERSION,
            "query": self.batch.query,
            "batch": self.batch.number,
            "transactions": [_transaction_out(each) for each in self.transactions],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Decision:
        """Raises SinkError for what a later version wrote."""
        content = json.loads(data)
        if content["version"] != _VERSION:
            raise SinkError(
                f"the decision about query {content.get('query')} was written by a newer version of this sink"
            )
        return cls(
            batch=MicroBatch(content["query"], content["batch"]),
            transactions=tuple(_transaction_in(each) for each in content["transactions"]),
        )


def _transaction_out(prepared: Prepared) -> dict[str, Any]:
    places = by_topic((place, None) for place in prepared.partitions)
    return {
        "id": prepared.transactional_id,
        "producer": prepared.producer_id,
        "epoch": prepared.epoch,
        "version": prepared.transaction_version,
        "partitions": {topic: [index for index, _ in parts] for topic, parts in places.items()},
    }


def _transaction_in(content: dict[str, Any]) -> Prepared:
    return Prepared(
        transactional_id=content["id"],
        producer_id=content["producer"],
        epoch=content["epoch"],
        transaction_version=content["version"],
        partitions=tuple((topic, index) for topic, parts in content["partitions"].items() for index in parts),
    )


# Looking


class Mark(NamedTuple):
    """That a batch and all before it are decided, and where that is written."""

    number: int
    offset: int


def last_mark(cluster: Cluster, query: str, *, stable: bool) -> Mark | None:
    """The last decision as the group knows it, which forgets it when a query has not run for a week or so.

    `stable` waits for a decision that is being written. Raises Unavailable, Refused.
    """
    found = committed(cluster, driver_name(query), [_PLACE], stable=stable).get(_PLACE)
    return None if found is None else Mark(int(json.loads(found.metadata)["batch"]), found.offset)


class Ledger:
    """A driver's turn: from `take` on no other driver can decide about the query, until one takes a turn itself."""

    def __init__(self, cluster: Cluster, query: str, *, is_new: bool = False) -> None:
        self.cluster = cluster
        self.query = query
        self._is_new = is_new  # nobody can have decided anything before
        self._producer = RawProducer(cluster, transactional_id=driver_name(query))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    @property
    def transaction_version(self) -> int:
        return self._producer.transaction_version

    def take(self) -> int | None:
        """Fence whoever had the turn. Returns the last batch that is decided. Raises Unavailable, Refused."""
        bookkeeping.make_ready(self.cluster, _NEW_TOPIC)
        self._producer.init()
        return self.last_batch()

    def last_batch(self) -> int | None:
        mark = last_mark(self.cluster, self.query, stable=True)
        if mark is not None:
            return mark.number
        found = None if self._is_new else self._search()
        return None if found is None else found.batch.number

    def last(self) -> Decision | None:
        """The last decision in full. Raises Unavailable, Refused, SinkError."""
        mark = last_mark(self.cluster, self.query, stable=True)
        found = self._read(mark) if mark is not None else None
        if found is None:
            found = self._search()
        if mark is not None and (found is None or found.batch.number != mark.number):
            raise SinkError(
                f"batch {mark.number} of query {self.query} is decided, but its record is not in {TOPIC}: "
                "somebody has deleted from that topic"
            )
        return found

    def decide(self, decision: Decision) -> None:
        """Once this returns, it is so; when it raises Unavailable only the next who takes the turn will know.

        Raises SinkError where another driver has the turn.
        """
        try:
            sent = self._send(decision.to_bytes())
            position = CommittedOffset(
                # Where a broker does not tell where it put the record, the record is searched for.
                offset=sent if sent is not None else 0,
                metadata=json.dumps({"batch": decision.batch.number}),
            )
            self._producer.commit_offsets(driver_name(self.query), {_PLACE: position})
            self._producer.end(commit=True)
        except Fenced:
            raise overtaken(decision.batch) from None

    def forget(self) -> None:
        """Let compaction remove the record; the group still knows for a while that there was one."""
        self._send(None)
        self._producer.end(commit=True)

    def _send(self, value: bytes | None) -> int | None:
        record = Record(0, int(time.time() * 1000), key=self.query.encode(), value=value)
        sent = self._producer.send(*_PLACE, encode_batch([record], codec=Codec.GZIP))
        self._producer.flush()
        return sent.offset

    # Finding the record

    def _read(self, mark: Mark) -> Decision | None:
        """At that offset. It was committed together with the mark, so nobody else's open transaction is waited for."""
        try:
            found = list(bookkeeping.views_at(self.cluster, TOPIC, mark.offset))
        except OutOfRange:
            return None
        for view in found:
            if view.header.base_offset <= mark.offset <= view.header.last_offset:
                return next(self._ours([view]), None)
        return None

    def _search(self) -> Decision | None:
        """The last one in the whole topic. All transactions of this query have ended, for ours is the turn."""
        last: Decision | None = None
        open_ones: dict[int, Decision | None] = {}
        for view in bookkeeping.views(self.cluster, TOPIC, bookkeeping.beginning_of(self.cluster, TOPIC)):
            producer_id = view.header.producer_id
            marker = parse_end_marker(view.data) if view.header.is_control else None
            if marker is not None:
                if marker.producer_id in open_ones and marker.committed:
                    last = open_ones[marker.producer_id]
                open_ones.pop(marker.producer_id, None)
            for record in bookkeeping.records_of(view):
                if record.key == self.query.encode():
                    open_ones[producer_id] = _decision(record)
        return last

    def _ours(self, views: Iterable[BatchView]) -> Iterator[Decision]:
        for view in views:
            for record in bookkeeping.records_of(view):
                found = _decision(record) if record.key == self.query.encode() else None
                if found is not None:
                    yield found


# Whose checkpoint it is


def _key(checkpoint: str) -> str:
    """That of no query."""
    return f"checkpoint{NOT_IN_NAMES}{checkpoint}"


def owner(cluster: Cluster, checkpoint: str) -> str | None:
    """The query that had this checkpoint last; None where nobody has told. Raises Unavailable, Refused."""
    bookkeeping.make_ready(cluster, _NEW_TOPIC)
    found = None
    start = bookkeeping.beginning_of(cluster, TOPIC)
    for each in bookkeeping.documents(cluster, TOPIC, start, key=_key(checkpoint)):
        found = str(each["query"])
    return found


def own(cluster: Cluster, checkpoint: str, query: str) -> None:
    """From now on it is this one. Raises Unavailable, Refused."""
    bookkeeping.append(cluster, TOPIC, {"version": _VERSION, "query": query}, key=_key(checkpoint))


def overtaken(batch: MicroBatch) -> SinkError:
    return SinkError(
        f"{batch}: another driver has taken this query over, and this one must stop; "
        "two queries cannot share one checkpoint"
    )


def _decision(record: Record) -> Decision | None:
    return None if record.value is None else Decision.from_bytes(record.value)
