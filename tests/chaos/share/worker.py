"""`python -m tests.chaos.share.worker JOB`: a worker of a share group that runs until it is killed, or crashes itself.

The outcome of a message is drawn for each delivery, except for poison messages, which are never accepted or crash the
worker. The worker writes each delivery to a journal before it acknowledges it, and then whether the
acknowledgement was stored, one JSON line each.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from confluent_kafka import KafkaException
from tests.chaos.share_consumers import share_consumer, stored_partitions
from tests.chaos.workload import CLIENT
from tests.compat.share import ACCEPT, REJECT, RELEASE

TOPIC, PARTITIONS, GROUP = "work", 4, "workers"
WAIT_S = 0.2
CALL_S = 8.0
STUCK_S = 30.0
LIMIT = 5  # deliveries
LOCK_S = 2.0

ACCEPTED, RELEASED, REJECTED, CRASHED = "accept", "release", "reject", "crash"
SAID = {ACCEPTED: ACCEPT, RELEASED: RELEASE, REJECTED: REJECT}
CHANCES = {ACCEPTED: 85.0, RELEASED: 11.0, REJECTED: 3.9, CRASHED: 0.1}
DALLIES = 0.01  # of rounds: holds what it got for longer than it may
#: Which messages are poison is known to all, so that it can be told whether they ended as they must.
RELEASED_ALWAYS, CRASHED_ALWAYS = (60, 7), (1500, 700)

GOT, STORED, UNKNOWN, STARTED = "got", "stored", "unknown", "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    servers: str
    journal: str
    seed: int
    batch: int = 40
    group: str = GROUP
    topic: str = TOPIC
    accepts_all: bool = False  # and has no accidents of its own

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def is_poison(number: int) -> bool:
    """It cannot end but in the dead-letter topic."""
    return any(number % cycle == place for cycle, place in (RELEASED_ALWAYS, CRASHED_ALWAYS))


def fate(number: int, chance: random.Random) -> str:
    if number % RELEASED_ALWAYS[0] == RELEASED_ALWAYS[1]:
        return RELEASED
    if number % CRASHED_ALWAYS[0] == CRASHED_ALWAYS[1]:
        return CRASHED
    return chance.choices(list(CHANCES), list(CHANCES.values()))[0]


class Worker:
    def __init__(self, job: Job) -> None:
        self._chance = random.Random(job.seed * 1_000_003 + os.getpid())
        self._journal = os.open(job.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._note(STARTED, [])
        settings = {**CLIENT, "max.poll.records": job.batch}
        self._accepts_all = job.accepts_all
        self._client = share_consumer(job.servers, job.group, job.topic, settings)

    def _note(self, event: str, rows: list[Any], began: float = 0.0) -> None:
        """In one piece, so that a kill tears no line in two."""
        os.write(self._journal, json.dumps([event, began, time.time(), rows]).encode() + b"\n")

    def run(self) -> None:
        while True:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            try:
                self._round()
            except KafkaException as error:
                self._note(UNKNOWN, [str(error)])

    def _round(self) -> None:
        began = time.time()
        messages = [message for message in self._client.poll(WAIT_S) if message.error() is None]
        if not messages:
            return
        rows = [self._row(message) for message in messages]
        self._note(GOT, rows, began)
        if any(row[-1] == CRASHED for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._accepts_all and self._chance.random() < DALLIES:
            time.sleep(LOCK_S * 1.5)
        for message, row in zip(messages, rows, strict=True):
            self._client.acknowledge(message, SAID[row[-1]])
        self._note(STORED, sorted(stored_partitions(self._client, CALL_S)))

    def _row(self, message: Any) -> list[Any]:
        number = int(message.value())
        fated = ACCEPTED if self._accepts_all else fate(number, self._chance)
        return [message.partition(), message.offset(), number, message.delivery_count(), fated]


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # where does it stand?
    Worker(Job(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
