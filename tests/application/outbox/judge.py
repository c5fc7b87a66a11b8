"""Judges what readers of committed messages get: every sale once, in the order of its key, and nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition
from tests.application.outbox.shop import Sale, told
from tests.chaos.checker import Findings

LOST = "lost sale"
DOUBLED = "doubled sale"
UNEXPECTED = "never committed"
ORDER = "out of order within its key"
READ_S = 30.0


class Read(NamedTuple):
    topic: str
    partition: int
    offset: int
    message_id: str
    key: str
    count: int


def judge(rows: Sequence[Read], sales: Sequence[Sale]) -> Findings:
    """`rows` are in the order of the log within each partition."""
    findings = Findings()
    wanted = {sale.message_id: sale for sale in sales}
    found = Counter(row.message_id for row in rows)
    for sale in sales:
        if sale.message_id not in found:
            findings.add(LOST, f"{sale} is not there")
    for row in rows:
        if row.message_id not in wanted:
            findings.add(UNEXPECTED, f"{row} tells of a sale that never was")
    for message_id, count in found.items():
        if count > 1:
            findings.add(DOUBLED, f"{wanted.get(message_id)} is there {count} times")
    _judge_order(rows, findings)
    return findings


def _judge_order(rows: Sequence[Read], findings: Findings) -> None:
    last: dict[tuple[str, str], Read] = {}
    for row in rows:
        before = last.get((row.topic, row.key))
        if before is not None and before.count > row.count:
            findings.add(ORDER, f"{row} comes after {before}")
        last[row.topic, row.key] = row


def read_all(bootstrap: str, topics: Sequence[str]) -> list[Read]:
    """All that is committed, partition by partition."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "judge",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
        }
    )
    try:
        known = reader.list_topics(timeout=READ_S).topics
        places = [
            TopicPartition(topic, p, 0) for topic in topics if topic in known for p in known[topic].partitions
        ]
        reader.assign(places)
        rows: list[Read] = []
        left = len(places)
        while left:
            message = reader.poll(READ_S)
            assert message is not None, f"{left} partitions are not read to their end"
            if message.error() is None:
                rows.append(_row(message))
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                left -= 1
        return sorted(rows)
    finally:
        reader.close()


def _row(message: object) -> Read:
    headers = dict(message.headers())  # type: ignore[attr-defined]
    place = (message.topic(), message.partition(), message.offset())  # type: ignore[attr-defined]
    return Read(*place, headers["message-id"].decode(), *told(message.value()))  # type: ignore[attr-defined]
