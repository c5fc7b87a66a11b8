"""Judges the lives of a lane by what their contract promises: what is lost, what is there twice."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.checks.checker import Findings
from tests.chaos.contracts.jobs import (
    AT_MOST_ONCE,
    EFFECTIVELY_ONCE,
    EXACTLY_ONCE,
    IN_FLIGHT_MAX,
    KEYS,
    LEDGERED,
    ORDERED,
    PARTITIONS,
    TAKEN_MAX,
    TASKS,
    THREADS,
    WITH_ROWS,
    ends_dead,
    id_of,
    place_of,
)
from tests.chaos.contracts.story import Lifetime, Story

LOST = "lost"
DOUBLED = "doubled"
LOST_MORE = "more lost than was in hand"  # at most once
UNCOUNTED = "lost, and not counted as perhaps lost"  # at most once
BACK = "begun before a known commit"
AGAIN = "handled though known to be marked"
WRONG_LETTER = "a dead letter of what did not fail"
DISORDER = "out of the order of its key"
IN_CALM = "lost or doubled though nothing was killed"
ANOMALIES = (LOST, DOUBLED, LOST_MORE, UNCOUNTED, BACK, AGAIN, WRONG_LETTER, DISORDER, IN_CALM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Of one lane: what was sent, what was written down, and what is there in the end."""

    contract: str
    shape: str
    fails: bool
    topic: str
    sent: int
    story: Story
    #: How often each number is in the target topic, among rows, in the dead-letter topic.
    published: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    letters: Mapping[int, int] = field(default_factory=dict)
    #: Numbers that were sent while nothing was killed.
    calm: Sequence[int] = ()

    def must_die(self, number: int) -> bool:
        return ends_dead(number, self.fails, self.contract)

    def results(self, number: int) -> int:
        """How often it has had the effect that its contract is about."""
        if self.contract == EXACTLY_ONCE:
            return self.published.get(number, 0)
        if self.contract in WITH_ROWS:
            return self.rows.get(number, 0)
        return self.story.done[number]

    def is_missing(self, number: int) -> bool:
        found = self.letters if self.must_die(number) else None
        return (found.get(number, 0) if found is not None else self.results(number)) == 0


def missing(case: Case) -> list[int]:
    """What has not come to its end, and may not be missing by the contract."""
    excused = excuses(case) if case.contract == AT_MOST_ONCE else set()
    return [number for number in range(case.sent) if case.is_missing(number) and number not in excused]


def excuses(case: Case) -> set[int]:
    """At most once: what was in hand when its process was killed, or dropped because a commit's fate was unknown."""
    found: set[int] = set()
    for life in case.story.lives:
        found |= life.dropped
        if life.was_killed:
            found |= _in_hand(life, case.shape)
    return found


def _in_hand(life: Lifetime, shape: str) -> set[int]:
    if shape in (THREADS, TASKS):  # letters of those that failed may still be on their way
        return life.in_hand | {number for number, _ in life.failed[-IN_FLIGHT_MAX:]}
    return set(life.taken[-1]) if life.taken else set()


def judge(case: Case, findings: Findings) -> None:
    name = f"{case.topic} ({case.contract}, {case.shape})"
    for number in missing(case):
        findings.add(LOST, f"{name}: {number}{_fate(case, number)}")
    _judge_results(case, name, findings)
    _judge_letters(case, name, findings)
    _judge_positions(case, name, findings)
    _judge_calm(case, name, findings)
    if case.contract == AT_MOST_ONCE:
        _judge_in_hand(case, name, findings)
        _judge_counts(case, name, findings)
    if case.contract == EFFECTIVELY_ONCE:
        _judge_marks(case, name, findings)
    if case.shape == ORDERED:
        _judge_order(case, name, findings)


def entries(story: Story) -> Counter[int]:
    """How often a handler began with each number."""
    return Counter(number for life in story.lives for number, _, _ in life.entered)


def _judge_results(case: Case, name: str, findings: Findings) -> None:
    if case.contract == AT_MOST_ONCE:
        for number, count in entries(case.story).items():
            if count > 1:
                findings.add(DOUBLED, f"{name}: {number} began {count} times{_fate(case, number)}")
    elif case.contract in (EXACTLY_ONCE, *WITH_ROWS):
        for number in range(case.sent):
            most = 0 if case.must_die(number) else 1
            if case.results(number) > most:
                findings.add(
                    DOUBLED, f"{name}: {number}, {case.results(number)} results{_fate(case, number)}"
                )


def _judge_letters(case: Case, name: str, findings: Findings) -> None:
    once = case.contract in (EXACTLY_ONCE, AT_MOST_ONCE)
    for number, count in case.letters.items():
        if not case.must_die(number):
            findings.add(WRONG_LETTER, f"{name}: {number}{_fate(case, number)}")
        elif once and count > 1:
            findings.add(DOUBLED, f"{name}: {count} dead letters of {number}{_fate(case, number)}")


def _judge_positions(case: Case, name: str, findings: Findings) -> None:
    """So what comes again is what was handled since the last commit, and no more.

    The last of which a member was told: a commit that waits for a broker may be sent again, and arrive after others.
    """
    for asked_s, where, position in case.story.begun:
        known = [each for each in case.story.committed.get(where, ()) if each.at_s < asked_s]
        last = max(known, key=lambda each: each.at_s).what if known else 0
        if position < last and case.contract != LEDGERED:
            findings.add(BACK, f"{name}: {where} from {position}, though {last} was committed")


def _judge_marks(case: Case, name: str, findings: Findings) -> None:
    marked = case.story.marked
    for life in case.story.lives:
        for number, _, taken_s in life.entered:
            known_s = marked.get(id_of(number, case.topic))
            if known_s is not None and known_s < taken_s:
                findings.add(AGAIN, f"{name}: {number} by {life.slot}{_fate(case, number)}")


def _judge_in_hand(case: Case, name: str, findings: Findings) -> None:
    lost = {number for number in range(case.sent) if case.is_missing(number)}
    most = IN_FLIGHT_MAX + TAKEN_MAX if case.shape in (THREADS, TASKS) else TAKEN_MAX
    for life in case.story.lives:
        if life.was_killed and len(gone := _in_hand(life, case.shape) & lost) > most:
            findings.add(LOST_MORE, f"{name}: {len(gone)} at once by {life.slot}")


def _judge_counts(case: Case, name: str, findings: Findings) -> None:
    """What a killed member has lost, a later one has counted."""
    dropped = {number for life in case.story.lives for number in life.dropped}
    for number in sorted(excuses(case) - dropped):
        if case.is_missing(number) and place_of(number, case.topic) not in case.story.counted:
            findings.add(UNCOUNTED, f"{name}: {number}{_fate(case, number)}")


def _judge_calm(case: Case, name: str, findings: Findings) -> None:
    for number in case.calm:
        found = case.results(number), case.letters.get(number, 0)
        if found != ((0, 1) if case.must_die(number) else (1, 0)):
            findings.add(IN_CALM, f"{name}: {number}{_fate(case, number)}")


def _judge_order(case: Case, name: str, findings: Findings) -> None:
    """Of each key, what was handled well for the first time was handled in the order in which it was sent."""
    firsts: dict[int, list[int]] = {}
    seen: set[int] = set()
    done = [number for life in case.story.lives for number in life.done]
    for number in done:
        if number not in seen:
            seen.add(number)
            firsts.setdefault(number % (PARTITIONS * KEYS), []).append(number)
    for numbers in firsts.values():
        for earlier, later in itertools.pairwise(numbers):
            if later < earlier:
                findings.add(DISORDER, f"{name}: {later} after {earlier}{_fate(case, later)}")


def _fate(case: Case, number: int) -> str:
    told = []
    for index, life in enumerate(case.story.lives):
        entered = [attempt for each, attempt, _ in life.entered if each == number]
        if number in life.taken_s:
            end = "killed" if life.was_killed else "left"
            done = life.done.count(number)
            told.append(f"life {index} of {life.slot} ({end}): entered {entered}, done {done}")
    where = f"{case.results(number)} results, {case.letters.get(number, 0)} letters"
    return f" [{where}; {'; '.join(told) or 'never taken'}]"
