"""`python -m tests.chaos.rebalance.host JOB`: members of a KIP-848 group, which come and go by command on stdin.

Each writes down what it owned, read and committed, and when, on the clock that all processes of a machine share. The
metadata of each commit names the member, so that the coordinator's own log tells whose position it has stored.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from tests.chaos.readers import CONSUMER

TOPIC = "work"
GROUP = "workers"
COMMIT_INTERVAL_S = 0.15
WAIT_S = 0.05
BATCH = 200
JOIN, LEAVE = "join", "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    servers: str
    number: int
    diary: str

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class Diary:
    """[time, process, member, event, detail] as JSON lines; each is with the kernel before the next thing happens."""

    def __init__(self, path: Path, process: int) -> None:
        self._file = path.open("ab", buffering=0)
        self._process = process

    def add(self, member: str, event: str, detail: Any = None) -> None:
        row = (time.monotonic(), self._process, member, event, detail)
        self._file.write(json.dumps(row).encode() + b"\n")


class Member:
    def __init__(self, job: Job, slot: int, diary: Diary) -> None:
        self._diary = diary
        self._leaving = threading.Event()
        self._next: dict[int, int] = {}  # read and not yet committed
        self._owned: set[int] = set()
        self._due_s = 0.0
        static = {"group.instance.id": f"host-{job.number}"} if slot == 0 else {}
        settings = {"group.id": GROUP, "group.protocol": "consumer", "bootstrap.servers": job.servers}
        self._consumer = Consumer({**CONSUMER, **settings, **static})
        self._name = ""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        self._leaving.set()

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        self._consumer.subscribe(
            [TOPIC], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        self._name = self._consumer.memberid()
        self._diary.add(self._name, "joined")
        while not self._leaving.is_set():
            self._read()
            if self._next and time.monotonic() >= self._due_s:
                self._commit(self._next)
                self._due_s = time.monotonic() + COMMIT_INTERVAL_S
        self._consumer.close()
        self._diary.add(self._name, "closed")

    def _read(self) -> None:
        rows = [
            [message.partition(), message.offset()]
            for message in self._consumer.consume(BATCH, WAIT_S)
            if message.error() is None
        ]
        if rows:
            self._diary.add(self._name, "read", rows)
            self._next |= {partition: offset + 1 for partition, offset in rows}

    def _commit(self, places: dict[int, int]) -> None:
        rows = list(places.items())
        self._next = {
            partition: offset for partition, offset in self._next.items() if partition not in places
        }
        self._diary.add(self._name, "commit", rows)
        offsets = [TopicPartition(TOPIC, *place, metadata=self._name) for place in rows]
        try:
            answer = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        except KafkaException as error:
            self._diary.add(self._name, "refused", [rows, error.args[0].name()])
            again = {number: offset for number, offset in rows if number in self._owned}
            self._next = {**again, **self._next}
            return
        kept = [[item.partition, item.offset] for item in answer if item.error is None]
        self._diary.add(self._name, "committed", kept)

    def _assigned(self, _: Consumer, given: list[TopicPartition]) -> None:
        self._owned.update(_numbers(given))
        self._diary.add(self._name or self._consumer.memberid(), "assigned", _numbers(given))

    def _revoked(self, _: Consumer, taken: list[TopicPartition]) -> None:
        """What was read is committed while it is still this member's; only then the broker is told."""
        self._owned.difference_update(_numbers(taken))
        mine = {number: self._next[number] for number in _numbers(taken) if number in self._next}
        if mine:
            self._commit(mine)
        self._diary.add(self._name, "revoked", _numbers(taken))

    def _lost(self, _: Consumer, taken: list[TopicPartition]) -> None:
        self._owned.difference_update(_numbers(taken))
        for number in _numbers(taken):
            self._next.pop(number, None)
        self._diary.add(self._name, "lost", _numbers(taken))


def _numbers(places: list[TopicPartition]) -> list[int]:
    return sorted(place.partition for place in places)


class Host:
    """Slots that members take; the first one's is a static member."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._diary = Diary(Path(job.diary), os.getpid())
        self._members: dict[int, Member] = {}

    def obey(self, command: str) -> None:
        word, slot = command.split()
        if word == JOIN:
            self._members[int(slot)] = Member(self._job, int(slot), self._diary)
        else:
            self._members.pop(int(slot)).leave()

    def end(self) -> None:
        for member in self._members.values():
            member.leave()
        for member in self._members.values():
            member.join()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    host = Host(Job(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        host.obey(line)
    host.end()


if __name__ == "__main__":
    main()
