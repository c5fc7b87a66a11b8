"""The decision log: one record for each batch of a query that is decided, that is, written permanently.

A decision names the transactions that make up a batch. It is made once, whichever driver tries and however often. The
driver writes it under the query's own transactional id, so that a driver which has been replaced is fenced. The same
transaction commits an offset in the group of the same name: the offset says where the record is, and its metadata says
for which batch. So one request finds the last decision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock.client.errors import ClientError, Fenced, OutOfRange
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition, by_topic
from penstock.client.wire.offsets import CommittedOffset, committed_offsets
from penstock.client.wire.producer import PreparedTransaction, RawProducer
from penstock.client.wire.topics import NewTopic
from penstock.protocol.record_batch import parse_end_marker
from penstock.spark import internal_topics

LOG_TOPIC: Final = internal_topics.DECISIONS_TOPIC
_LOG_PARTITION: Final[TopicPartition] = internal_topics.only_partition(LOG_TOPIC)
#: Only the last small record of each query matters, so small segments that are compacted early keep the log short.
_NEW_TOPIC: Final = NewTopic(
    name=LOG_TOPIC,
    partitions=1,
    settings={
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.1",
        "segment.bytes": str(16 << 20),
    },
)
#: A character that does not occur in query ids.
QUERY_SEPARATOR: Final = "/"
_VERSION: Final = 1


class SinkError(ClientError):
    """Data cannot be written exactly once."""


class MicroBatch(NamedTuple):
    """The unit of an exactly-once write: a batch of a streaming query, or number 0 of a write with its own id."""

    query: str
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of query {self.query}"


def sink_transactional_id(query: str) -> str:
    """Return the transactional id of a query's decisions. It also names the group whose offset locates the last one."""
    return f"penstock-sink-{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    batch: MicroBatch
    transactions: tuple[PreparedTransaction, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each.transactional_id for each in self.transactions)

    def to_bytes(self) -> bytes:
        content = {
            "version": _VERSION,
            "query": self.batch.query,
            "batch": self.batch.number,
            "transactions": [_transaction_to_json(each) for each in self.transactions],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Decision:
        """Parse a decision. Raises SinkError if a newer version wrote it."""
        content = json.loads(data)
        if content["version"] != _VERSION:
            raise SinkError(
                f"the decision about query {content.get('query')} was written by a newer version of this sink"
            )
        return cls(
            batch=MicroBatch(content["query"], content["batch"]),
            transactions=tuple(_transaction_from_json(each) for each in content["transactions"]),
        )


def _transaction_to_json(prepared: PreparedTransaction) -> dict[str, Any]:
    partitions = by_topic((tp, None) for tp in prepared.partitions)
    return {
        "id": prepared.transactional_id,
        "producer": prepared.producer_id,
        "epoch": prepared.epoch,
        "version": prepared.transaction_version,
        "partitions": {topic: [index for index, _ in parts] for topic, parts in partitions.items()},
    }


def _transaction_from_json(content: dict[str, Any]) -> PreparedTransaction:
    return PreparedTransaction(
        transactional_id=content["id"],
        producer_id=content["producer"],
        epoch=content["epoch"],
        transaction_version=content["version"],
        partitions=tuple((topic, index) for topic, parts in content["partitions"].items() for index in parts),
    )


# Reading


class DecidedBatch(NamedTuple):
    """The last decided batch, and the offset of its decision. All batches before it are decided too."""

    number: int
    offset: int


def last_decided_batch(cluster: Cluster, query: str, *, stable: bool) -> DecidedBatch | None:
    """Return the last decision according to the group's offset, which expires if a query has not run for about a week.

    With `stable`, wait for a decision that is being written. Raises Unavailable, Refused.
    """
    found = committed_offsets(cluster, sink_transactional_id(query), [_LOG_PARTITION], stable=stable).get(
        _LOG_PARTITION
    )
    return None if found is None else DecidedBatch(int(json.loads(found.metadata)["batch"]), found.offset)


class DecisionLog:
    """Decides for one query. `take` fences all other drivers of the query, until another driver calls `take`."""

    def __init__(self, cluster: Cluster, query: str, *, is_new: bool = False) -> None:
        self.cluster = cluster
        self.query = query
        self._is_new = is_new  # there can be no earlier decisions
        self._producer = RawProducer(cluster, transactional_id=sink_transactional_id(query))

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    @property
    def transaction_version(self) -> int:
        return self._producer.transaction_version

    def take(self) -> int | None:
        """Fence all other drivers, and return the last decided batch. Raises Unavailable, Refused."""
        internal_topics.ensure_internal_topic(self.cluster, _NEW_TOPIC)
        self._producer.init()
        return self.last_batch()

    def last_batch(self) -> int | None:
        decided = last_decided_batch(self.cluster, self.query, stable=True)
        if decided is not None:
            return decided.number
        found = None if self._is_new else self._search()
        return None if found is None else found.batch.number

    def last(self) -> Decision | None:
        """Return the whole last decision. Raises Unavailable, Refused, SinkError."""
        decided = last_decided_batch(self.cluster, self.query, stable=True)
        found = self._read(decided.offset) if decided is not None else None
        if found is None:
            found = self._search()
        if decided is not None and (found is None or found.batch.number != decided.number):
            raise SinkError(
                f"batch {decided.number} of query {self.query} is decided, but its record is not in {LOG_TOPIC}: "
                "records were deleted from that topic"
            )
        return found

    def decide(self, decision: Decision) -> None:
        """Write the decision. When this returns, it is final.

        Raises SinkError if another driver has fenced this one. Raises Unavailable if the outcome is unknown; the next
        driver that calls `take` finds it out.
        """
        try:
            sent = self._send(decision.to_bytes())
            position = CommittedOffset(
                # If the broker does not return the record's offset, `last` searches for the record.
                offset=sent if sent is not None else 0,
                metadata=json.dumps({"batch": decision.batch.number}),
            )
            self._producer.commit_offsets(sink_transactional_id(self.query), {_LOG_PARTITION: position})
            self._producer.end(commit=True)
        except Fenced:
            raise fenced_error(decision.batch) from None

    def forget(self) -> None:
        """Write a tombstone, so that compaction removes the record. The group's offset remains until it expires."""
        self._send(None)
        self._producer.end(commit=True)

    def _send(self, value: bytes | None) -> int | None:
        sent = self._producer.send(*_LOG_PARTITION, internal_topics.encode_record(self.query, value))
        self._producer.flush()
        return sent.offset

    # Finding the record

    def _read(self, offset: int) -> Decision | None:
        """Return the decision at the offset that the group has committed.

        The record and the offset were committed together, so the record can be read without waiting for open
        transactions of other queries.
        """
        try:
            found = list(internal_topics.batches_at(self.cluster, LOG_TOPIC, offset))
        except OutOfRange:
            return None
        for view in found:
            if view.header.base_offset <= offset <= view.header.last_offset:
                for record in internal_topics.decode_view(view):
                    if record.key == self.query.encode() and record.value is not None:
                        return Decision.from_bytes(record.value)
        return None

    def _search(self) -> Decision | None:
        """Return the query's last decision in the whole topic.

        All transactions of this query have ended, because `take` has fenced other drivers.
        """
        last: Decision | None = None
        undecided: dict[int, Decision | None] = {}
        for view in internal_topics.read_batches(
            self.cluster, LOG_TOPIC, internal_topics.beginning_offset(self.cluster, LOG_TOPIC)
        ):
            producer_id = view.header.producer_id
            marker = parse_end_marker(view.data) if view.header.is_control else None
            if marker is not None:
                if marker.producer_id in undecided and marker.committed:
                    last = undecided[marker.producer_id]
                undecided.pop(marker.producer_id, None)
            for record in internal_topics.decode_view(view):
                if record.key == self.query.encode():
                    value = record.value
                    undecided[producer_id] = None if value is None else Decision.from_bytes(value)
        return last


# Owners of checkpoints


def _checkpoint_key(checkpoint: str) -> str:
    """Return the key of a checkpoint's record. The separator makes it differ from the id of every query."""
    return f"checkpoint{QUERY_SEPARATOR}{checkpoint}"


def checkpoint_owner(cluster: Cluster, checkpoint: str) -> str | None:
    """Return the query that used this checkpoint last, or None if none is recorded. Raises Unavailable, Refused."""
    internal_topics.ensure_internal_topic(cluster, _NEW_TOPIC)
    found = None
    start = internal_topics.beginning_offset(cluster, LOG_TOPIC)
    for each in internal_topics.read_documents(cluster, LOG_TOPIC, start, key=_checkpoint_key(checkpoint)):
        found = str(each["query"])
    return found


def set_checkpoint_owner(cluster: Cluster, checkpoint: str, query: str) -> None:
    """Record that this query uses the checkpoint from now on. Raises Unavailable, Refused."""
    internal_topics.append_document(
        cluster, LOG_TOPIC, {"version": _VERSION, "query": query}, key=_checkpoint_key(checkpoint)
    )


def fenced_error(batch: MicroBatch) -> SinkError:
    return SinkError(f"{batch}: another driver has fenced this one; two queries cannot share one checkpoint")
