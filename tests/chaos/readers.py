"""Clients that read: the tail of every partition, old parts again, and a group that commits what it has read."""

import random
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from tests.chaos.checks.checker import FINAL
from tests.chaos.checks.history import History
from tests.chaos.workload import CLIENT, PARTITIONS, PLAINTEXT, STRONG, Client, Progress

CONSUMER = {
    **CLIENT,
    "auto.offset.reset": "earliest",
    "check.crcs": True,
    "enable.auto.commit": False,
    "fetch.error.backoff.ms": 50,
    "fetch.queue.backoff.ms": 50,
    "fetch.wait.max.ms": 200,
}
BATCH = 500
WAIT_S = 0.1
REREAD_RECORDS = 300
COMMIT_INTERVAL_S = 0.3
FINAL_READING_S = 180


class Reader(Client):
    """A consumer of one topic that reads what it is assigned by its own choice."""

    def __init__(
        self,
        name: str,
        topic: str,
        servers: str,
        history: History,
        progress: Progress,
        partitions: int | None = None,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__(name, history, progress)
        self._security = security
        self._topic = topic
        self._partitions = PARTITIONS[topic] if partitions is None else partitions
        self._servers = servers
        self._ends: dict[int, int] = {}

    def _connect(self, **more: Any) -> Consumer:
        given = {"group.id": self.name, "bootstrap.servers": self._servers, "error_cb": self.heard, **more}
        return Consumer({**CONSUMER, **self._security, **given})

    def _begin(self, consumer: Consumer, places: dict[int, int]) -> None:
        self.history.add(self.name, "ok", "seek", self._topic, [[*place] for place in places.items()])
        consumer.assign([TopicPartition(self._topic, *place) for place in places.items()])

    def _read(self, consumer: Consumer, count: int = BATCH) -> list[list[int]]:
        """[partition, offset, value] of what has arrived."""
        rows = [row for message in consumer.consume(count, WAIT_S) if (row := self._row(message))]
        if rows:
            self.history.add(self.name, "ok", "poll", self._topic, rows)
            self.progress.deliver(len(rows))
        return rows

    def _row(self, message: Message) -> list[int] | None:
        error = message.error()
        if error is not None:
            self._told(error, message)
            return None
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert offset is not None
        assert value is not None
        return [partition, offset, int(value)]

    def _told(self, error: KafkaError, message: Message) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._ends[message.partition() or 0] = message.offset() or 0
        else:
            self.progress.trouble(f"{self._topic} poll: {error.name()}")


class Tail(Reader):
    """Reads every partition from its start, for ever."""

    def __init__(
        self,
        topic: str,
        servers: str,
        history: History,
        progress: Progress,
        partitions: int | None = None,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__(f"tail-{topic}", topic, servers, history, progress, partitions, security)

    def work(self) -> None:
        consumer = self._connect()
        self._begin(consumer, dict.fromkeys(range(self._partitions), 0))
        while not self.stopping.is_set():
            self._read(consumer)
        consumer.close()


class Again(Reader):
    """Reads pieces of the past: what was there once must be there always."""

    def __init__(
        self,
        servers: str,
        history: History,
        progress: Progress,
        seed: int,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__("again", STRONG, servers, history, progress, security=security)
        self._chance = random.Random(seed)

    def work(self) -> None:
        consumer = self._connect()
        while not self.stopping.wait(0.5):
            partition = self._chance.randrange(PARTITIONS[STRONG])
            try:
                start, end = consumer.get_watermark_offsets(TopicPartition(STRONG, partition), timeout=3)
            except KafkaException as error:
                self.heard(error.args[0])
                continue
            if end - start > REREAD_RECORDS:
                self._read_piece(consumer, partition, self._chance.randrange(start, end - REREAD_RECORDS))
        consumer.close()

    def _read_piece(self, consumer: Consumer, partition: int, start: int) -> None:
        self._begin(consumer, {partition: start})
        left, deadline = REREAD_RECORDS, time.monotonic() + 5
        while left > 0 and time.monotonic() < deadline and not self.stopping.is_set():
            left -= len(self._read(consumer, left))
        consumer.unassign()


class Member(Reader):
    """One of a group: reads what the group gives it, and commits it."""

    def __init__(
        self,
        number: int,
        servers: str,
        history: History,
        progress: Progress,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__(f"member-{number}", STRONG, servers, history, progress, security=security)
        self._next: dict[int, int] = {}

    def work(self) -> None:
        sessions = {"group.id": "group", "session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
        consumer = self._connect(**sessions)
        consumer.subscribe([STRONG], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)
        due = 0.0
        while not self.stopping.is_set():
            for partition, offset, _ in self._read(consumer):
                self._next[partition] = offset + 1
            if self._next and time.monotonic() >= due:
                self._commit(consumer)
                due = time.monotonic() + COMMIT_INTERVAL_S
        consumer.close()

    def _assigned(self, consumer: Consumer, given: list[TopicPartition]) -> None:
        places = self._committed(consumer, given)
        starts = {partition: max(offset, 0) for partition, offset in places.items()}
        self._begin(consumer, starts)

    def _committed(self, consumer: Consumer, given: list[TopicPartition]) -> dict[int, int]:
        """Asked until it is answered: a member that guessed would read again or skip."""
        while True:
            self.history.add(self.name, "invoke", "committed", STRONG, [])
            try:
                found = consumer.committed(given, timeout=5)
                if any(item.error for item in found):
                    raise KafkaException(next(item.error for item in found if item.error))
            except KafkaException as error:
                self.history.add(self.name, "info", "committed", STRONG, [])
                self.heard(error.args[0])
                if self.stopping.is_set():
                    return {}
                continue
            places = {item.partition: max(item.offset, -1) for item in found}
            self.history.add(self.name, "ok", "committed", STRONG, [[*place] for place in places.items()])
            return places

    def _revoked(self, consumer: Consumer, taken: list[TopicPartition]) -> None:
        for item in taken:
            self._next.pop(item.partition, None)

    def _commit(self, consumer: Consumer) -> None:
        rows = [[*place] for place in self._next.items()]
        offsets = [TopicPartition(STRONG, *place) for place in self._next.items()]
        self._next = {}
        self.history.add(self.name, "invoke", "commit", STRONG, rows)
        try:
            answer = consumer.commit(offsets=offsets, asynchronous=False) or []
        except KafkaException as error:
            self.history.add(self.name, "info", "commit", STRONG, rows)
            self.heard(error.args[0])
            return
        kept = [[item.partition, item.offset] for item in answer if item.error is None]
        self.history.add(self.name, "ok", "commit", STRONG, kept)
        self.progress.commit(len(kept))


class Last(Reader):
    """When everything is over: all that there is, read by a newcomer."""

    def __init__(
        self,
        topic: str,
        servers: str,
        history: History,
        progress: Progress,
        partitions: int | None = None,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__(f"{FINAL}-{topic}", topic, servers, history, progress, partitions, security)

    def work(self) -> None:
        consumer = self._connect(**{"enable.partition.eof": True})
        self._begin(consumer, dict.fromkeys(range(self._partitions), 0))
        deadline = time.monotonic() + FINAL_READING_S
        while len(self._ends) < self._partitions:
            self._read(consumer)
            assert time.monotonic() < deadline, f"{self.name} has not come to the end of all partitions"
        consumer.close()


def read_whole(servers: str, topic: str, isolation: str) -> list[Message]:
    """All records of all partitions, each partition in its order."""
    settings = {"enable.partition.eof": True, "group.id": "newcomer", "isolation.level": isolation}
    consumer = Consumer({**CONSUMER, **settings, "bootstrap.servers": servers})
    wanted = set(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in wanted])
    read: list[Message] = []
    deadline = time.monotonic() + FINAL_READING_S
    while wanted:
        assert time.monotonic() < deadline, f"{topic} has not come to the end of partitions {wanted}"
        for message in consumer.consume(BATCH, WAIT_S):
            error = message.error()
            if error is None:
                read.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                wanted.discard(message.partition())
    consumer.close()
    return read
