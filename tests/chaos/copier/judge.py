"""Judges what a reader of committed records got: every message once, in the order of its key, and nothing else."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.chaos.checks.checker import FINAL, Findings
from tests.chaos.checks.history import Op
from tests.chaos.copier.worker import KEYS

LOST = "lost message"
DOUBLED = "doubled message"
ORDER = "out of order within its key"
UNEXPECTED = "unexpected"  # was never sent, or only in a transaction that was never committed
INCONSISTENT = "inconsistent offset"  # two readers were given different values
HANGING = "hanging transaction"  # open, or holding readers back, when everything is over
POSITION = "position is not the end"  # of the group, in a topic that it has copied whole
ANOMALIES = (LOST, DOUBLED, ORDER, UNEXPECTED, INCONSISTENT, HANGING, POSITION)


class Row(NamedTuple):
    partition: int
    offset: int
    value: int


def judge(rows: Sequence[Row], total: int, findings: Findings) -> None:
    """`rows` are all that a newcomer got, per partition in the order of the log; numbers 0 to `total` were sent."""
    counts = Counter(row.value for row in rows)
    for value in sorted(set(range(total)) - counts.keys()):
        findings.add(LOST, f"{value} was sent and is not there")
    for row in rows:
        if not 0 <= row.value < total:
            findings.add(UNEXPECTED, f"{row}")
    for value, count in counts.items():
        if count > 1:
            places = [f"{row.partition}@{row.offset}" for row in rows if row.value == value]
            findings.add(DOUBLED, f"{value} is there {count} times: {', '.join(places)}")
    _judge_order(rows, findings)


def _judge_order(rows: Sequence[Row], findings: Findings) -> None:
    last: dict[int, Row] = {}
    for row in rows:
        before = last.get(row.value % KEYS)
        if before is not None and before.value > row.value:
            findings.add(ORDER, f"{row} comes after {before}")
        last[row.value % KEYS] = row


def rows_by_reader(history: Iterable[Op]) -> tuple[list[Row], list[Row]]:
    """What was read when everything was over, and what was read meanwhile."""
    final: list[Row] = []
    meanwhile: list[Row] = []
    for op in history:
        if op.f == "poll":
            rows = final if op.process.startswith(FINAL) else meanwhile
            rows += [Row(*values) for values in op.values]
    return final, meanwhile


def compare(final: Sequence[Row], meanwhile: Sequence[Row], findings: Findings) -> None:
    """A reader that ran during the campaign got what is there in the end, each record once and in order."""
    wanted = _by_partition(final)
    for partition, rows in _by_partition(meanwhile).items():
        for had, has in zip(rows, wanted[partition], strict=False):
            if had != has:
                findings.add(INCONSISTENT, f"{had} was read where in the end there was {has}")
                break


def _by_partition(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.partition].append(row)
    return found
