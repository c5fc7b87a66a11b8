"""Judges scheduled delivery: everyone is given each message, in one place, and none before its time."""

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.checks.checker import Findings

EARLY = "delivered early"
STAMPED_EARLY = "stamped before it was due"
TWICE = "delivered twice"  # in two places of the log, or again to a share group that had accepted it
LOST = "lost"  # acknowledged, and not there, or not given to a group
UNEXPECTED = "unexpected"  # was never sent, or stands in another partition, or another place for others
ANOMALIES = (EARLY, STAMPED_EARLY, TWICE, LOST, UNEXPECTED)


class Sent(NamedTuple):
    partition: int
    due_ms: int  # by the sender's clock, which is everyone's here; 0 for what is not held


class Got(NamedTuple):
    number: int
    partition: int
    offset: int
    stamp_ms: int
    at_ms: int


@dataclass(slots=True)
class Ledger:
    """What was sent and acknowledged, and what each group was given. Any thread may write it."""

    sent: dict[int, Sent] = field(default_factory=dict)
    acknowledged: dict[int, None] = field(default_factory=dict)
    given: dict[str, list[Got]] = field(default_factory=lambda: defaultdict(list))
    seen: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: Numbers that a share group has accepted, and knows that it has.
    accepted: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    again: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def give(self, group: str, rows: list[Got]) -> None:
        with self.lock:
            self.given[group] += rows
            self.seen[group].update(row.number for row in rows)

    def counts(self, groups: list[str]) -> list[int]:
        """Acknowledged, and given to each group."""
        with self.lock:
            return [len(self.acknowledged), *(len(self.seen[group]) for group in groups)]

    def missing(self, group: str) -> set[int]:
        with self.lock:
            return self.acknowledged.keys() - self.seen[group]


def judge(ledger: Ledger, groups: Iterable[str], findings: Findings) -> None:
    places: dict[int, tuple[int, int]] = {}
    for group in groups:
        for row in ledger.given[group]:
            _judge_row(ledger, group, row, places, findings)
        for number in sorted(ledger.missing(group)):
            findings.add(LOST, f"{number} ({ledger.sent[number]}) was never given to {group}")
    for words in ledger.again:
        findings.add(TWICE, words)


def _judge_row(
    ledger: Ledger, group: str, row: Got, places: dict[int, tuple[int, int]], findings: Findings
) -> None:
    sent = ledger.sent.get(row.number)
    if sent is None or sent.partition != row.partition:
        findings.add(UNEXPECTED, f"{group} was given {row} of {sent}")
        return
    place = places.setdefault(row.number, (row.partition, row.offset))
    if place != (row.partition, row.offset):
        findings.add(TWICE, f"{row.number} was at {place}; {group} was given {row}")
    if row.at_ms < sent.due_ms:
        findings.add(EARLY, f"{group} was given {row}, due at {sent.due_ms}")
    if sent.due_ms and row.stamp_ms < sent.due_ms:
        findings.add(STAMPED_EARLY, f"{group} was given {row}, due at {sent.due_ms}")
