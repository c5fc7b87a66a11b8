"""Judges a share group: every record ends accepted, rejected or past its limit, and those two are buried once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.chaos.checker import Findings
from tests.chaos.share.journals import Delivery, Place
from tests.chaos.share.worker import ACCEPTED, GROUP, LIMIT, REJECTED, TOPIC, is_poison

LOST = "lost"  # neither accepted nor buried
AGAIN = "delivered after its end"
BURIED_TWICE = "buried twice"
BURIED_WRONGLY = "buried wrongly"  # accepted, or for a reason that it does not have
UNBURIED = "not buried"  # rejected or poison, and not in the dead-letter topic
OVER_LIMIT = "delivered beyond the limit"
LETTER = "wrong dead letter"  # its headers or contents are not those of the record
CHANGED = "another record"  # than the one that is in that place
ANOMALIES = (LOST, AGAIN, BURIED_TWICE, BURIED_WRONGLY, UNBURIED, OVER_LIMIT, LETTER, CHANGED)

BY_LIMIT, BY_REJECTION, BY_LOCK = "limit", "rejected", "lock expired"


class Source(NamedTuple):
    """A record as it was sent."""

    number: int
    key: bytes | None
    timestamp_ms: int


class Letter(NamedTuple):
    """A dead letter: what it says of itself, and what it brings along."""

    partition: int  # of the dead-letter topic
    value: bytes | None
    key: bytes | None
    headers: dict[str, str]

    @property
    def place(self) -> Place:
        return Place(*(int(self.headers.get(f"__dlq.errors.{name}", -1)) for name in ("partition", "offset")))

    @property
    def reason(self) -> str:
        return self.headers.get("penstock.dlq.reason", "")

    @property
    def delivery(self) -> int:
        return int(self.headers.get("__dlq.errors.delivery.count", -1))


def judge(
    source: Mapping[Place, Source],
    deliveries: Mapping[Place, Sequence[Delivery]],
    letters: Sequence[Letter],
    findings: Findings,
) -> None:
    buried: dict[Place, list[Letter]] = defaultdict(list)
    for letter in letters:
        buried[letter.place].append(letter)
        if letter.place not in source:
            findings.add(LETTER, f"{letter} is of no record")
    for place, record in source.items():
        given, of_it = deliveries.get(place, ()), buried.get(place, ())
        _judge_end(place, record, given, of_it, findings)
        _judge_deliveries(place, record, given, findings)
        for letter in of_it:
            _judge_letter(place, record, given, letter, findings)


def _judge_end(
    place: Place,
    record: Source,
    given: Sequence[Delivery],
    letters: Sequence[Letter],
    findings: Findings,
) -> None:
    words = f"{place} ({record.number}), given {list(given)}, buried {[letter.reason for letter in letters]}"
    stored = {each.fate for each in given if each.stored_s is not None}
    if len(letters) > 1:
        findings.add(BURIED_TWICE, words)
    if letters and ACCEPTED in stored:
        findings.add(BURIED_WRONGLY, words)
    if not letters and (REJECTED in stored or is_poison(record.number)):
        findings.add(UNBURIED, words)
    elif not letters and not any(each.fate == ACCEPTED for each in given):
        # A worker that crashed, or got no reply, may have rejected it or not.
        kind = UNBURIED if any(each.fate == REJECTED for each in given) else LOST
        findings.add(kind, words)


def _judge_deliveries(place: Place, record: Source, given: Sequence[Delivery], findings: Findings) -> None:
    ends = [each.stored_s for each in given if each.fate in (ACCEPTED, REJECTED) and each.stored_s]
    for each in given:
        if each.number != record.number:
            findings.add(CHANGED, f"{each} at {place} of {record}")
        if each.delivery > LIMIT:
            findings.add(OVER_LIMIT, f"{place}: {each}")
        if ends and each.asked_s > min(ends):
            findings.add(AGAIN, f"{place}: {each}, though it ended at {min(ends)}")


def _judge_letter(
    place: Place, record: Source, given: Sequence[Delivery], letter: Letter, findings: Findings
) -> None:
    is_right = {
        BY_LIMIT: letter.delivery == LIMIT,
        BY_LOCK: letter.delivery == LIMIT,
        BY_REJECTION: any(each.fate == REJECTED and each.delivery == letter.delivery for each in given),
    }.get(letter.reason, False)
    if not is_right:
        findings.add(BURIED_WRONGLY, f"{place} ({record.number}), given {list(given)}: {letter}")
    expected = {
        "__dlq.errors.topic": TOPIC,
        "__dlq.errors.group": GROUP,
        "penstock.dlq.timestamp": str(record.timestamp_ms),
        "trace": str(record.number),
    }
    differing = {
        name: letter.headers.get(name) for name in expected if letter.headers.get(name) != expected[name]
    }
    contents = (letter.partition, letter.value, letter.key)
    if differing or contents != (place.partition, b"%d" % record.number, record.key):
        findings.add(LETTER, f"{place} ({record}): {letter}")
