"""What the lives of a lane have written down, told again: which life did what to which message."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.contracts import journal as diary
from tests.chaos.contracts.journal import Line

Where = tuple[str, int]


@dataclass(slots=True)
class Lifetime:
    """`was_killed` unless it has ended as an operator would end it."""

    slot: str
    began_s: float
    was_killed: bool = True
    taken: list[list[int]] = field(default_factory=list)  # batches of numbers
    entered: list[tuple[int, int, float]] = field(default_factory=list)  # number, attempt, when it was taken
    done: list[int] = field(default_factory=list)
    failed: list[tuple[int, int]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    #: When it took a number for the last time.
    taken_s: dict[int, float] = field(default_factory=dict)

    @property
    def in_hand(self) -> set[int]:
        """Taken and neither done nor failed."""
        over = set(self.done) | {number for number, _ in self.failed}
        return {number for batch in self.taken for number in batch} - over


@dataclass(frozen=True, slots=True)
class Known:
    """Something that was known to be stored at a time."""

    at_s: float
    what: Any


class Story:
    def __init__(self) -> None:
        self.lives: list[Lifetime] = []
        self.committed: dict[Where, list[Known]] = defaultdict(list)
        self.begun: list[tuple[float, Where, int]] = []  # when it was asked for, and the position
        #: At most once: places that were counted as perhaps lost.
        self.counted: set[tuple[str, int, int]] = set()
        self.marked: dict[str, float] = {}  # ids, and when they were known to be marked first
        self.trapped: Counter[tuple[str, str]] = Counter()
        self.broken: list[str] = []
        self.figures: Counter[str] = Counter()
        #: Of all lives.
        self.taken: set[int] = set()
        self.done: Counter[int] = Counter()
        #: The last line of each slot.
        self.latest: dict[str, Line] = {}
        self._open: dict[str, Lifetime] = {}

    def add(self, slot: str, lines: Iterable[Line]) -> None:
        for line in lines:
            self.latest[slot] = line
            _TELLERS[line.event](self, slot, line.at_s, *line.told)

    def _started(self, slot: str, at_s: float, *_: Any) -> None:
        self._open[slot] = Lifetime(slot, at_s)
        self.lives.append(self._open[slot])

    def _begun(self, slot: str, at_s: float, asked_s: float, rows: list[Any]) -> None:
        self.begun += [(asked_s, (topic, partition), offset) for topic, partition, offset in rows]

    def _taken(self, slot: str, at_s: float, rows: list[Any]) -> None:
        life, numbers = self._open[slot], [row[-1] for row in rows]
        life.taken.append(numbers)
        life.taken_s.update(dict.fromkeys(numbers, at_s))
        self.taken.update(numbers)

    def _entered(self, slot: str, at_s: float, number: int, attempt: int) -> None:
        life = self._open[slot]
        life.entered.append((number, attempt, life.taken_s[number]))

    def _done(self, slot: str, at_s: float, number: int) -> None:
        self._open[slot].done.append(number)
        self.done[number] += 1

    def _failed(self, slot: str, at_s: float, number: int, attempt: int) -> None:
        self._open[slot].failed.append((number, attempt))

    def _committed(self, slot: str, at_s: float, rows: list[Any]) -> None:
        for topic, partition, offset in rows:
            self.committed[topic, partition].append(Known(at_s, offset))

    def _marked(self, slot: str, at_s: float, ids: list[str]) -> None:
        for message_id in ids:
            self.marked.setdefault(message_id, at_s)

    def _dropped(self, slot: str, at_s: float, numbers: list[int]) -> None:
        self._open[slot].dropped.update(numbers)

    def _unfinished(self, slot: str, at_s: float, topic: str, partition: int, first: int, end: int) -> None:
        self.counted |= {(topic, partition, offset) for offset in range(first, end)}

    def _trapped(self, slot: str, at_s: float, point: str, action: str) -> None:
        self.trapped[point, action] += 1

    def _idle(self, slot: str, at_s: float, places: int, paused: int) -> None:
        pass

    def _left(self, slot: str, at_s: float, figures: dict[str, int]) -> None:
        self._open[slot].was_killed = False
        self.figures.update(figures)

    def _broken(self, slot: str, at_s: float, words: str) -> None:
        self.broken.append(f"{slot}: {words}")


_TELLERS: dict[str, Any] = {
    diary.STARTED: Story._started,
    diary.BEGUN: Story._begun,
    diary.TAKEN: Story._taken,
    diary.ENTERED: Story._entered,
    diary.DONE: Story._done,
    diary.FAILED: Story._failed,
    diary.COMMITTED: Story._committed,
    diary.MARKED: Story._marked,
    diary.DROPPED: Story._dropped,
    diary.UNFINISHED: Story._unfinished,
    diary.TRAPPED: Story._trapped,
    diary.IDLE: Story._idle,
    diary.LEFT: Story._left,
    diary.BROKEN: Story._broken,
}
