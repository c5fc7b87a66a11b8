"""Threads beside a campaign: one keeps a backlog, one does something again and again."""

import random
import threading
import time
from collections.abc import Callable

from confluent_kafka import Producer
from tests.chaos.campaign import RECOVERY_S
from tests.chaos.share.journals import RecordPosition
from tests.chaos.workload import CLIENT

TOPIC, PARTITIONS, GROUP = "once", 4, "once"
BACKLOG = 1200
FEED = 480
PAYLOAD = b" " * 60


def place_of(number: int) -> RecordPosition:
    """Where a message is: nothing but messages is in the topic, and each of them once."""
    return RecordPosition(number % PARTITIONS, number // PARTITIONS)


class Feeder(threading.Thread):
    """Keeps a backlog, in small batches; what goes in is not what is tested here."""

    def __init__(self, servers: str, lag: Callable[[], int | None]) -> None:
        super().__init__(name="feeder", daemon=True)
        self._lag = lag
        self._producer = Producer(
            {
                **CLIENT,
                "batch.num.messages": 3,
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 1,
                "request.timeout.ms": 2000,
            }
        )
        self._feeding = threading.Lock()
        self.sent = 0
        self.going = threading.Event()
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.1):
                if self.going.is_set() and (lag := self._lag()) is not None and lag < BACKLOG:
                    with self._feeding:
                        if self.going.is_set():
                            self._feed(FEED)
        except BaseException as error:
            self.failure = error

    def rest(self) -> None:
        """Returns when nothing more comes."""
        self.going.clear()
        with self._feeding:
            pass

    def feed(self, count: int) -> None:
        with self._feeding:
            self._feed(count)

    def _feed(self, count: int) -> None:
        for number in range(self.sent, self.sent + count):
            self._producer.produce(TOPIC, b"%d" % number + PAYLOAD, partition=number % PARTITIONS)
            self._producer.poll(0)
        assert self._producer.flush(RECOVERY_S) == 0, "messages were not taken in"
        self.sent += count


class Repeated(threading.Thread):
    """Does something so many times, at a random pace."""

    def __init__(self, act: Callable[[], None], times: int, pace_s: tuple[float, float], seed: int) -> None:
        super().__init__(name="repeated", daemon=True)
        self._act = act
        self._left = times
        self._pace_s = pace_s
        self._chance = random.Random(seed)
        self._failure: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return not self.is_alive()

    def check(self) -> None:
        if self._failure is not None:
            raise AssertionError("not done to the end") from self._failure

    def run(self) -> None:
        try:
            for _ in range(self._left):
                time.sleep(self._chance.uniform(*self._pace_s))
                self._act()
        except BaseException as error:
            self._failure = error
