"""The processes that members live in, and what happens to them."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.children import ChildProcess
from tests.chaos.rebalance import diaries
from tests.chaos.rebalance.diaries import Entry, Freeze
from tests.chaos.rebalance.host import JOIN, LEAVE, Job

LEAST_MEMBERS = 2


class Lodging:
    """A process and the slots that are taken in it."""

    def __init__(self, number: int, servers: str, folder: Path) -> None:
        self.diary = folder / f"host-{number}.jsonl"
        job = Job(servers=servers, number=number, diary=str(self.diary))
        self.process = ChildProcess(
            "tests.chaos.rebalance.host", [job.as_text()], folder / f"host-{number}.log"
        )
        self.slots: set[int] = set()
        self.frozen_s = 0.0
        self.thaw_at_s = 0.0

    def launch(self) -> None:
        self.process.launch()
        for slot in sorted(self.slots):
            self.process.tell(f"{JOIN} {slot}")


class Crowd:
    def __init__(
        self, folder: Path, servers: str, *, hosts: int, members: int, chance: random.Random
    ) -> None:
        self._lodgings = [Lodging(number, servers, folder) for number in range(1, hosts + 1)]
        self._members = members
        self._chance = chance
        self.freezes: list[Freeze] = []
        self.killed_s: dict[int, float] = {}  # by process

    def start(self) -> None:
        for lodging in self._lodgings:
            lodging.slots = {0}
            lodging.launch()

    @property
    def _awake(self) -> list[Lodging]:
        return [lodging for lodging in self._lodgings if not lodging.process.is_frozen]

    @property
    def count(self) -> int:
        """Members that are not standing still."""
        return sum(len(lodging.slots) for lodging in self._awake)

    def join_one(self) -> bool:
        places = [(each, n) for each in self._awake for n in range(self._members) if n not in each.slots]
        if not places:
            return False
        lodging, slot = self._chance.choice(places)
        lodging.slots.add(slot)
        lodging.process.tell(f"{JOIN} {slot}")
        return True

    def leave_one(self) -> bool:
        places = [(each, slot) for each in self._awake for slot in sorted(each.slots)]
        if len(places) <= LEAST_MEMBERS:
            return False
        lodging, slot = self._chance.choice(places)
        lodging.slots.remove(slot)
        lodging.process.tell(f"{LEAVE} {slot}")
        return True

    def crash_one(self) -> bool:
        """It is back at once: without a word its members of before are there until their sessions end."""
        lodging = self._victim()
        if lodging is None:
            return False
        pid = lodging.process.pid
        lodging.process.kill()
        self.killed_s[pid] = time.monotonic()
        lodging.launch()
        return True

    def freeze_one(self, lasting_s: float) -> bool:
        lodging = self._victim()
        if lodging is None:
            return False
        lodging.frozen_s = time.monotonic()
        lodging.process.freeze()
        lodging.thaw_at_s = lodging.frozen_s + lasting_s
        return True

    def _victim(self) -> Lodging | None:
        """One that others can stand in for."""
        found = [each for each in self._awake if each.slots and self.count - len(each.slots) > 0]
        return self._chance.choice(found) if found else None

    def thaw_due(self) -> None:
        for lodging in self._lodgings:
            if lodging.process.is_frozen and time.monotonic() >= lodging.thaw_at_s:
                self._thaw(lodging)

    def thaw_all(self) -> None:
        for lodging in self._lodgings:
            if lodging.process.is_frozen:
                self._thaw(lodging)

    def _thaw(self, lodging: Lodging) -> None:
        self.freezes.append(Freeze(lodging.process.pid, lodging.frozen_s, time.monotonic()))
        lodging.process.thaw()

    def at_least(self, count: int) -> None:
        while self.count < count:
            self.join_one()

    def deaths(self) -> list[str]:
        """Problems: processes that ended on their own; each is reported once and started again."""
        found = []
        for lodging in self._lodgings:
            if (code := lodging.process.exit_code) is not None:
                found.append(f"host of members has died by itself ({code}), see {lodging.diary.stem}.log")
                self.killed_s[lodging.process.pid] = time.monotonic()
                lodging.process.kill()
                lodging.launch()
        return found

    def stop(self) -> None:
        self.thaw_all()
        for lodging in self._lodgings:
            lodging.process.finish()

    def kill(self) -> None:
        for lodging in self._lodgings:
            lodging.process.kill()

    def entries(self) -> Iterator[Entry]:
        for lodging in self._lodgings:
            if lodging.diary.exists():
                yield from diaries.read(lodging.diary)
