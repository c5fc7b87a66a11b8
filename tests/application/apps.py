"""Applications for tests, in this process and in processes of their own."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from tests.brokers import environment
from tests.waiting import PATIENCE_S, eventually

from penstock.client import Penstock

#: Rebalances of tests need not wait for slow members.
QUICK = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 500, "fetch.wait.max.ms": 50}


class Program:
    """A program in a process of its own, whose output is read to its end."""

    def __init__(self, *command: str, folder: Path, **variables: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.lines.extend(line.rstrip("\n") for line in output)

    def printed(self, words: str) -> list[str]:
        return [line for line in tuple(self.lines) if words in line]

    def await_line(self, words: str) -> None:
        """Fails with all of the output if no line has the words in time."""

        def is_there() -> bool:
            assert self.printed(words), "\n".join([f"it printed no {words!r}, but:", *self.lines])
            return True

        eventually(is_there, what=f"{words!r} in the output of the program")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(60)
        self._reader.join(60)
        return code

    @property
    def is_printing(self) -> bool:
        """Whether it, or any process that it has started, may still print."""
        return self._reader.is_alive()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(app: Penstock, until: Callable[[], bool], within_s: float = PATIENCE_S) -> Iterator[None]:
    """Begins the subscriptions, and goes on when `until` says so; then everything is closed."""
    app.start()
    try:
        eventually(until, within_s=within_s, what="what the application is to do")
        yield
    finally:
        app.close()


def read_all(bootstrap: str, topic: str) -> list[Any]:
    """Every committed message of a topic."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    try:
        found = reader.list_topics(topic, timeout=60).topics[topic]
        left = set(found.partitions)
        reader.assign([TopicPartition(topic, number, 0) for number in left])
        messages = []
        while left:
            message = reader.poll(60)
            assert message is not None, f"no end of {topic}"
            if message.error() is None:
                messages.append(message)
            else:
                left.discard(message.partition())
        return messages
    finally:
        reader.close()


def header(message: Any, name: str) -> str | None:
    found = dict(message.headers() or ()).get(name)
    return found.decode() if found is not None else None


def committed(bootstrap: str, group: str, topic: str, partitions: int = 1) -> dict[int, int]:
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        told = reader.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=10)
        return {each.partition: each.offset for each in told}
    finally:
        reader.close()
