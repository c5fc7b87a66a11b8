"""Judges a share group. Every record must end in one way: acknowledged, or rejected, or at its delivery limit. A
rejected record and one at its limit must have exactly one dead letter, and an acknowledged record none.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.chaos.checks.checker import Findings
from tests.chaos.share.journals import Delivery, RecordPosition
from tests.chaos.share.worker import ACCEPTED, GROUP, LIMIT, REJECTED, TOPIC, is_poison

LOST = "lost"  # neither acknowledged nor dead-lettered
DELIVERED_AFTER_END = "delivered after its end"
DEAD_LETTERED_TWICE = "dead-lettered twice"
DEAD_LETTERED_WRONGLY = (
    "dead-lettered wrongly"  # acknowledged, or with a reason that does not hold for the record
)
NOT_DEAD_LETTERED = "not dead-lettered"  # rejected or poison, and not in the dead-letter topic
OVER_LIMIT = "delivered beyond the limit"
WRONG_DEAD_LETTER = "wrong dead letter"  # its headers or contents are not those of the record
WRONG_RECORD = "wrong record"  # delivered with the contents of another record
ANOMALIES = (
    LOST,
    DELIVERED_AFTER_END,
    DEAD_LETTERED_TWICE,
    DEAD_LETTERED_WRONGLY,
    NOT_DEAD_LETTERED,
    OVER_LIMIT,
    WRONG_DEAD_LETTER,
    WRONG_RECORD,
)

BY_LIMIT, BY_REJECTION, BY_LOCK = "limit", "rejected", "lock expired"


class Source(NamedTuple):
    """A record as it was sent."""

    number: int
    key: bytes | None
    timestamp_ms: int


class DeadLetter(NamedTuple):
    """A record of the dead-letter topic. `partition` is its partition there."""

    partition: int
    value: bytes | None
    key: bytes | None
    headers: dict[str, str]

    @property
    def source(self) -> RecordPosition:
        return RecordPosition(
            *(int(self.headers.get(f"__dlq.errors.{name}", -1)) for name in ("partition", "offset"))
        )

    @property
    def reason(self) -> str:
        return self.headers.get("penstock.dlq.reason", "")

    @property
    def delivery(self) -> int:
        return int(self.headers.get("__dlq.errors.delivery.count", -1))


def judge(
    source: Mapping[RecordPosition, Source],
    deliveries: Mapping[RecordPosition, Sequence[Delivery]],
    dead_letters: Sequence[DeadLetter],
    findings: Findings,
) -> None:
    by_source: dict[RecordPosition, list[DeadLetter]] = defaultdict(list)
    for dead_letter in dead_letters:
        by_source[dead_letter.source].append(dead_letter)
        if dead_letter.source not in source:
            findings.add(WRONG_DEAD_LETTER, f"{dead_letter} has no source record")
    for position, record in source.items():
        given, of_record = deliveries.get(position, ()), by_source.get(position, ())
        _judge_end(position, record, given, of_record, findings)
        _judge_deliveries(position, record, given, findings)
        for dead_letter in of_record:
            _judge_dead_letter(position, record, given, dead_letter, findings)


def _judge_end(
    position: RecordPosition,
    record: Source,
    given: Sequence[Delivery],
    dead_letters: Sequence[DeadLetter],
    findings: Findings,
) -> None:
    reasons = [dead_letter.reason for dead_letter in dead_letters]
    words = f"{position} ({record.number}), delivered {list(given)}, dead letters {reasons}"
    stored = {each.fate for each in given if each.stored_s is not None}
    if len(dead_letters) > 1:
        findings.add(DEAD_LETTERED_TWICE, words)
    if dead_letters and ACCEPTED in stored:
        findings.add(DEAD_LETTERED_WRONGLY, words)
    if not dead_letters and (REJECTED in stored or is_poison(record.number)):
        findings.add(NOT_DEAD_LETTERED, words)
    elif not dead_letters and not any(each.fate == ACCEPTED for each in given):
        # A worker that crashed, or got no reply, may have rejected the record or not.
        kind = NOT_DEAD_LETTERED if any(each.fate == REJECTED for each in given) else LOST
        findings.add(kind, words)


def _judge_deliveries(
    position: RecordPosition, record: Source, given: Sequence[Delivery], findings: Findings
) -> None:
    ends = [each.stored_s for each in given if each.fate in (ACCEPTED, REJECTED) and each.stored_s]
    for each in given:
        if each.number != record.number:
            findings.add(WRONG_RECORD, f"{each} at {position} of {record}")
        if each.delivery > LIMIT:
            findings.add(OVER_LIMIT, f"{position}: {each}")
        if ends and each.asked_s > min(ends):
            findings.add(DELIVERED_AFTER_END, f"{position}: {each}, although it ended at {min(ends)}")


def _judge_dead_letter(
    position: RecordPosition,
    record: Source,
    given: Sequence[Delivery],
    dead_letter: DeadLetter,
    findings: Findings,
) -> None:
    has_right_reason = {
        BY_LIMIT: dead_letter.delivery == LIMIT,
        BY_LOCK: dead_letter.delivery == LIMIT,
        BY_REJECTION: any(each.fate == REJECTED and each.delivery == dead_letter.delivery for each in given),
    }.get(dead_letter.reason, False)
    if not has_right_reason:
        findings.add(
            DEAD_LETTERED_WRONGLY, f"{position} ({record.number}), delivered {list(given)}: {dead_letter}"
        )
    expected = {
        "__dlq.errors.topic": TOPIC,
        "__dlq.errors.group": GROUP,
        "penstock.dlq.timestamp": str(record.timestamp_ms),
        "trace": str(record.number),
    }
    has_wrong_headers = any(dead_letter.headers.get(name) != value for name, value in expected.items())
    contents = (dead_letter.partition, dead_letter.value, dead_letter.key)
    if has_wrong_headers or contents != (position.partition, b"%d" % record.number, record.key):
        findings.add(WRONG_DEAD_LETTER, f"{position} ({record}): {dead_letter}")
