"""Checks what read_committed readers get: every sale once, in the order of its key, and nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.application.outbox.reading import messages
from tests.application.outbox.shop import Sale, told
from tests.chaos.checks.checker import Findings

LOST = "lost sale"
DOUBLED = "doubled sale"
UNEXPECTED = "never committed"
ORDER = "out of order within its key"


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
    return [_row(message) for message in messages(bootstrap, topics)]


def _row(message: Any) -> Read:
    headers = dict(message.headers())
    place = (message.topic(), message.partition(), message.offset())
    return Read(*place, headers["message-id"].decode(), *told(message.value()))
