"""Threads in which one raw member after the other lives and dies, and the book of what they got."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.once.points import ALL, NO_KILL, Broken, Report, Target, member
from tests.chaos.share.journals import RecordPosition
from tests.chaos.workload import pick

REST_S = 0.05


class Book:
    """What raw members have got and said. Any thread may write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.points: Counter[str] = Counter()
        self.received: dict[RecordPosition, str] = {}
        self.doubled: list[str] = []
        self.again: list[str] = []
        self.confirmed = 0
        self.doubtful = 0
        self.broken: Counter[str] = Counter()
        self.calm: set[RecordPosition] = set()  # confirmed by members that were not killed

    def add(self, report: Report) -> None:
        with self._lock:
            if report.is_hit and report.point != NO_KILL:
                self.points[report.point] += 1
            for place in report.received:
                if place in self.received:
                    self.doubled.append(f"{place} at {self.received[place]} and at {report.point}")
                self.received[place] = report.point
            self.again += [f"{place} at {report.point}" for place in report.again]
            self.confirmed += report.confirmed
            self.doubtful += report.doubtful
            if report.point == NO_KILL and report.confirmed:
                self.calm.update(report.received)

    def trouble(self, words: str) -> None:
        with self._lock:
            self.broken[words] += 1

    @property
    def points_count(self) -> int:
        return sum(self.points.values())


class Lane(threading.Thread):
    """`weights`: where members die; {NO_KILL: 1} where none does. `find` says who leads a partition now."""

    def __init__(
        self, number: int, seed: int, find: Callable[[int], Target | None], book: Book, partitions: int
    ):
        super().__init__(name=f"lane-{number}", daemon=True)
        self._chance = random.Random(seed * 101 + number)
        self._find = find
        self._book = book
        self._partitions = partitions
        self.weights: dict[str, int] = dict(ALL)
        self.stopping = threading.Event()
        self.going = threading.Event()
        self.resting = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                if not self.going.is_set():
                    self.resting.set()
                    self.going.wait(REST_S)
                    continue
                self.resting.clear()
                self._live()
        except BaseException as error:
            self.failure = error

    def _live(self) -> None:
        target = self._find(self._chance.randrange(self._partitions))
        if target is None:
            time.sleep(REST_S)
            return
        point = pick(self._chance, self.weights)
        try:
            with member(target, self._chance) as one:
                report = one.live(point)
        except (OSError, AssertionError, Broken) as error:
            self._book.trouble(str(error) or type(error).__name__)
            time.sleep(REST_S)
            return
        self._book.add(report)
        if not report.is_hit:
            time.sleep(REST_S)


class Lanes:
    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        for lane in lanes:
            lane.start()

    def go(self, weights: dict[str, int]) -> None:
        for lane in self._lanes:
            lane.weights = dict(weights)
            lane.going.set()

    def rest(self) -> None:
        """Returns when no member lives."""
        for lane in self._lanes:
            lane.resting.clear()
            lane.going.clear()
        for lane in self._lanes:
            assert lane.resting.wait(60), f"{lane.name} does not come to rest"

    def check(self) -> None:
        for lane in self._lanes:
            if lane.failure is not None:
                raise AssertionError(f"{lane.name} has failed") from lane.failure

    def end(self) -> None:
        for lane in self._lanes:
            lane.stopping.set()
        for lane in self._lanes:
            lane.join(60)
