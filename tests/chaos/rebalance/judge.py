"""Judges who owned what, twice: by the coordinator's own log, and by what the members themselves saw.

The log is exact. Its records say in one order what each member has been given and has not yet given back (assigned, or
told to be given up), who was removed, and which positions were stored; each position names the member that committed
it. So, at every record of the log: no partition is with two members (TWO_OWNERS), a position is stored only while its
member has the partition (FENCED_COMMIT), and positions do not go back (COMMIT_BACK).

Members see less. One that stood still or was cut off for longer than its session believes that it owns partitions
which others have been given: it has been fenced, and learns of it with its next heartbeat. So times of two members at
one partition may overlap only where one of them had been fenced: it was told that it had lost the partition, or its
process had stood still for about a session. All else is TWO_UNFENCED. What a member asks to commit while the partition
is with another, unfenced member is not kept (LATE_COMMIT). Who is given a partition goes on where it was committed
before (READ_AGAIN), and nothing is passed over (NEVER_READ): so a record that two members have read was read first by
one that had not committed it, and that could not commit it any more.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tests.chaos.checks.checker import Findings
from tests.chaos.rebalance.diaries import Commit, Freeze, Reading, Tenure, Told

TWO_OWNERS = "two owners"
FENCED_COMMIT = "position of a fenced member"
COMMIT_BACK = "position went backwards"
TWO_UNFENCED = "two unfenced owners"
LATE_COMMIT = "commit kept while another is the owner"
READ_AGAIN = "read again after it was committed"
NEVER_READ = "never read"
ANOMALIES = (TWO_OWNERS, FENCED_COMMIT, COMMIT_BACK, TWO_UNFENCED, LATE_COMMIT, READ_AGAIN, NEVER_READ)

NOTHING: Final[frozenset[int]] = frozenset()
LOST = "lost"


class Owns(NamedTuple):
    """A member has these partitions from here on, and none when it is removed."""

    member: str
    partitions: frozenset[int]


class Stores(NamedTuple):
    member: str
    partition: int
    offset: int


def judge_log(events: Iterable[Owns | Stores], findings: Findings) -> None:
    owners: dict[int, str] = {}
    owned: dict[str, frozenset[int]] = {}
    positions: dict[int, int] = {}
    for event in events:
        if isinstance(event, Owns):
            _hand_over(event, owners, owned, findings)
            continue
        if owners.get(event.partition) != event.member:
            findings.add(FENCED_COMMIT, f"{event} while {owners.get(event.partition, 'no member')} has it")
        if event.offset < positions.get(event.partition, 0):
            findings.add(COMMIT_BACK, f"{event} after {positions[event.partition]}")
        positions[event.partition] = event.offset


def _hand_over(
    event: Owns, owners: dict[int, str], owned: dict[str, frozenset[int]], findings: Findings
) -> None:
    for partition in owned.get(event.member, NOTHING) - event.partitions:
        if owners.get(partition) == event.member:
            del owners[partition]
    for partition in event.partitions:
        before = owners.get(partition, event.member)
        if before != event.member:
            findings.add(TWO_OWNERS, f"{partition} is given to {event.member} while {before} has it")
        owners[partition] = event.member
    owned[event.member] = event.partitions


class Around(NamedTuple):
    """What could have had members fenced."""

    freezes: Sequence[Freeze]
    session_s: float
    heartbeat_s: float

    def is_fenced(self, tenure: Tenure) -> bool:
        return tenure.ending == LOST or any(self._fences(freeze, tenure) for freeze in self.freezes)

    def _fences(self, freeze: Freeze, tenure: Tenure) -> bool:
        """It stood still for about a session, and not yet when its time there was over."""
        is_long = freeze.end_s - freeze.start_s >= self.session_s - 2 * self.heartbeat_s
        return freeze.process == tenure.process and is_long and freeze.start_s < tenure.end_s


def judge_members(told: Told, around: Around, findings: Findings) -> Counter[str]:
    """Returns how often two members believed to own a partition, by what the fenced one was told in the end."""
    fenced: Counter[str] = Counter()
    commits, readings = _commits(told), _readings(told)
    for partition, tenures in told.tenures.items():
        for one, other in _overlaps(tenures):
            if around.is_fenced(one) or around.is_fenced(other):
                fenced[(one if around.is_fenced(one) else other).ending or "nothing"] += 1
            else:
                findings.add(TWO_UNFENCED, f"{one} and {other}")
        for commit in commits[partition]:
            _judge_commit(commit, tenures, around, findings)
        _judge_positions(tenures, commits[partition], readings, findings)
    return fenced


def _overlaps(tenures: Sequence[Tenure]) -> Iterator[tuple[Tenure, Tenure]]:
    """Pairs of different members, in order of their start."""
    current: list[Tenure] = []
    for tenure in tenures:
        current = [each for each in current if each.end_s > tenure.start_s]
        yield from ((each, tenure) for each in current if each.member != tenure.member)
        current.append(tenure)


def _judge_commit(commit: Commit, tenures: Sequence[Tenure], around: Around, findings: Findings) -> None:
    for tenure in tenures:
        is_anothers = tenure.start_s < commit.asked_s and commit.done_s < tenure.end_s
        if is_anothers and tenure.member != commit.member and not around.is_fenced(tenure):
            findings.add(LATE_COMMIT, f"{commit} within {tenure}")


def _judge_positions(
    tenures: Sequence[Tenure],
    commits: Sequence[Commit],
    readings: Mapping[tuple[str, int], Sequence[Reading]],
    findings: Findings,
) -> None:
    for tenure in tenures:
        start = max((commit.offset for commit in commits if commit.done_s < tenure.start_s), default=0)
        for reading in readings.get((tenure.member, tenure.partition), ()):
            is_within = tenure.start_s <= reading.time_s <= tenure.end_s
            if is_within and reading.offset < start:
                findings.add(READ_AGAIN, f"{reading}, and {start} was committed before {tenure}")


def _commits(told: Told) -> dict[int, list[Commit]]:
    found: dict[int, list[Commit]] = defaultdict(list)
    for commit in told.commits:
        found[commit.partition].append(commit)
    return found


def _readings(told: Told) -> dict[tuple[str, int], list[Reading]]:
    found: dict[tuple[str, int], list[Reading]] = defaultdict(list)
    for reading in told.readings:
        found[reading.member, reading.partition].append(reading)
    return found


def judge_completeness(told: Told, ends: Mapping[int, int], findings: Findings) -> None:
    read = {(reading.partition, reading.offset) for reading in told.readings}
    for partition, end in ends.items():
        missing = [offset for offset in range(end) if (partition, offset) not in read]
        if missing:
            findings.add(
                NEVER_READ, f"{len(missing)} records of partition {partition}, such as {missing[:3]}"
            )
