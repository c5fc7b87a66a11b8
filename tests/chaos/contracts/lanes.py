"""A lane: a topic, a group and its members, in which one life after the other is begun and ends at a chosen point."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer
from tests.chaos.contracts import points
from tests.chaos.contracts.jobs import (
    AT_MOST_ONCE,
    BATCHES,
    CLASSIC,
    CONSUMER,
    FREEZE,
    KILL,
    PARTITIONS,
    SHAPES,
    WITH_ROWS,
    Job,
    Trap,
    has_id,
    key_of,
)
from tests.chaos.contracts.journal import IDLE, Line, Reader
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.contracts.nursery import Life, Nursery
from tests.chaos.contracts.story import Story
from tests.chaos.workload import pick

from penstock.protocol.dead_letter_headers import MESSAGE_ID

BACKLOG, FEED = 70, 90
LIFE_S = 6.0  # a life that does not come to its point is killed from outside
AWAY_S = 2.2  # frozen for longer than a session
AFTERWARDS_S = 1.0  # and what it does when it wakes up is waited for
PASSAGES_MAX = 5
FAILURES_MAX = 10
STOPPING, FROZEN = 0.06, 0.25  # of lives, and of those of pairs
#: Members must not freeze while the shared file is locked.
UNLOCKED = ("before the batch", "before the commit", "after the commit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a lane is about. A pair has two members that are not static, so that others take over what one had."""

    name: str
    contract: str
    shape: str
    fails: bool
    is_pair: bool
    protocol: str
    database: str
    #: Whose points are used; the contract is broken so, or left as it is.
    mutation: str | None = None
    is_broken: bool = False


def terms_of(contract: str, count: int, database: Callable[[str], str]) -> list[Terms]:
    """Every shape in turn, half of them with failures, every third a pair."""
    made = []
    for index in range(count):
        shape = SHAPES[contract][index % len(SHAPES[contract])]
        is_pair = index % 3 == 2 and shape != "ordered"
        name = f"{contract.replace(' ', '-')}-{index}"
        made.append(
            Terms(
                name=name,
                contract=contract,
                shape=shape,
                fails=(index % 2 == 1 or shape == "ordered") and (contract, shape) != (AT_MOST_ONCE, BATCHES),
                is_pair=is_pair,
                protocol=CONSUMER if is_pair and index % 2 else CLASSIC,
                database=database(name),
            )
        )
    return made


class Lane:
    """Any thread may look at its story while it goes on."""

    def __init__(
        self, terms: Terms, servers: str, folder: Path, nursery: Nursery, producer: Producer, seed: int
    ) -> None:
        self.terms = terms
        self.topic = terms.name
        self._servers = servers
        self._folder = folder
        self._nursery = nursery
        self._producer = producer
        self._chance = random.Random(f"{seed} {terms.name}")
        self.slots = [f"{terms.name}-{letter}" for letter in ("ab" if terms.is_pair else "a")]
        self._readers = {slot: Reader(folder / f"{slot}.jsonl") for slot in self.slots}
        self._begun_s: dict[str, float] = {}
        self._lock = threading.RLock()
        self._feeding = threading.Lock()
        self.story = Story()
        self.sent = 0
        self.calm: list[int] = []
        #: Lives that did not come to their point, and that ended by themselves.
        self.outside = 0
        self.failures = 0
        #: How much was handled for the first time in each life.
        self.news: list[int] = []

    @property
    def target(self) -> str:
        return f"{self.topic}-target"

    # -- what there is to do ---------------------------------------------------------------------------

    def feed(self, count: int) -> range:
        with self._feeding:
            numbers = range(self.sent, self.sent + count)
            for number in numbers:
                headers = [(MESSAGE_ID, f"m{number}".encode())] if has_id(number) else []
                self._producer.produce(
                    self.topic,
                    b"%d" % number,
                    key_of(number),
                    partition=number % PARTITIONS,
                    headers=headers,
                )
                self._producer.poll(0)
            assert self._producer.flush(90) == 0, "messages were not taken in"
            self.sent += count
        return numbers

    def read(self) -> Story:
        with self._lock:
            for slot, reader in self._readers.items():
                self.story.add(slot, reader.read())
            return self.story

    # -- lives that end at a point ---------------------------------------------------------------------

    def storm(self, is_over: Callable[[], bool]) -> None:
        """In all slots at once."""
        threads = [Storm(self, slot, is_over) for slot in self.slots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for thread in threads:
            if thread.failure is not None:
                raise AssertionError(f"{thread.name} has failed") from thread.failure

    def one_life(self, slot: str, is_over: Callable[[], bool]) -> None:
        done = len(self.read().done)
        if self.sent - len(self.story.taken) < BACKLOG:
            self.feed(FEED)
        life = self.begin(slot, self._draw_trap(slot))
        self._until_its_end(life, is_over)
        with self._lock:
            self.news.append(len(self.read().done) - done)
            self.failures += bool(life.status) and not life.was_killed
            assert self.failures < FAILURES_MAX, f"lives of {self.topic} end by themselves; see their logs"

    def begin(
        self,
        slot: str,
        trap: Trap | None = None,
        stops_after: int | None = None,
        is_calm: bool = False,
    ) -> Life:
        terms = self.terms
        if trap is not None and trap.point in points.WHILE_LEAVING:
            stops_after = self._chance.randint(1, 20)
        job = Job(
            servers=self._servers,
            slot=slot,
            topic=self.topic,
            contract=terms.contract,
            shape=terms.shape,
            journal=str(self._folder / f"{slot}.jsonl"),
            log=str(self._folder / f"{slot}.log"),
            database=terms.database,
            fails=terms.fails,
            protocol=terms.protocol,
            instance=None if terms.is_pair else slot,
            trap=trap,
            stops_after=stops_after,
            mutation=terms.mutation if terms.is_broken else None,
            is_calm=is_calm,
        )
        self._begun_s[slot] = time.monotonic()
        return self._nursery.begin(job)

    def _draw_trap(self, slot: str) -> Trap:
        chance, terms = self._chance, self.terms
        if terms.mutation is not None:
            mutation = MUTATIONS[terms.mutation]
            if mutation.action == FREEZE and slot != self.slots[0]:
                return Trap(points.HANDLER_AFTER, points.PATIENT)  # somebody must be there to take over
            return Trap(mutation.point, chance.randint(2, 4), mutation.action)
        if chance.random() < STOPPING:
            return Trap(pick(chance, points.WHILE_LEAVING), 1)
        weights = points.BY_CONTRACT[terms.contract]
        if not terms.fails:
            weights = {point: weight for point, weight in weights.items() if "letter" not in point}
        action = FREEZE if terms.is_pair and chance.random() < FROZEN else KILL
        if action == FREEZE and terms.contract in WITH_ROWS and terms.database.startswith("sqlite"):
            weights = dict.fromkeys(UNLOCKED, 1)
        point = pick(chance, weights)
        most = 1 if point in points.RARE else 25 if point in points.HANDLER else PASSAGES_MAX
        return Trap(point, chance.randint(1, most), action)

    def _until_its_end(self, life: Life, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIFE_S
        while not life.wait(0.2):
            if life.is_frozen:
                self._stand_still(life)
                life.kill()
            elif time.monotonic() > deadline or is_over():
                self.outside += 1
                life.kill()

    def _stand_still(self, life: Life) -> None:
        time.sleep(AWAY_S)
        life.thaw()
        life.wait(AFTERWARDS_S)

    # -- lives without kills ---------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Everyone has looked for more since it began, there was none, and nothing waits for its time."""
        latest = self.read().latest
        return all(slot in latest and self._is_at_rest(slot, latest[slot]) for slot in self.slots)

    def _is_at_rest(self, slot: str, line: Line) -> bool:
        return line.event == IDLE and line.at_s > self._begun_s[slot] and not line.told[1]


class Storm(threading.Thread):
    def __init__(self, lane: Lane, slot: str, is_over: Callable[[], bool]) -> None:
        super().__init__(name=slot, daemon=True)
        self._lane = lane
        self._slot = slot
        self._is_over = is_over
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over():
                self._lane.one_life(self._slot, self._is_over)
        except BaseException as error:
            self.failure = error
