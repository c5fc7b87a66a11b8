"""Sellers: threads that commit and roll back sales, some slowly, so that ids are committed out of order."""

import random
import threading
from types import TracebackType
from typing import Any, Self

from tests.application.outbox.shop import KEYS, TOPICS, Shop

PAUSE_S = 0.02
SLOW_S = 0.06


class Sellers:
    """At work until the block ends."""

    def __init__(self, shop: Shop, count: int, seed: int) -> None:
        self._shop = shop
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._highest = 0
        #: Transactions that were rolled back, rows committed after a greater id, and what went wrong.
        self.undone = 0
        self.late_rows = 0
        self.problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _work(self, chance: random.Random) -> None:
        connection = self._shop.connect()
        try:
            while not self._stopping.wait(chance.uniform(0, PAUSE_S)):
                self._sell(connection, chance)
        except Exception as error:
            self.problems.append(f"a seller failed: {error!r}")
        finally:
            connection.close()

    def _sell(self, connection: Any, chance: random.Random) -> None:
        """One to three keys in the order of their names, so that no two sellers wait for each other."""
        self._shop.begin(connection)
        ids = []
        for key in sorted(chance.sample(range(KEYS), chance.randint(1, 3))):
            self._shop.sell(connection, f"k{key}", chance.choice(TOPICS))
            ids.append(self._last_id(connection))
        if chance.random() < 0.3:
            self._stopping.wait(chance.uniform(0, SLOW_S))
        if chance.random() < 0.25:
            connection.rollback()
            self.undone += 1
            return
        connection.commit()
        with self._lock:
            self.late_rows += sum(number < self._highest for number in ids)
            self._highest = max(self._highest, *ids)

    def _last_id(self, connection: Any) -> int:
        sql = "SELECT MAX(id) FROM penstock_outbox" if self._shop.is_sqlite else "SELECT lastval()"
        return int(connection.execute(sql).fetchone()[0])
