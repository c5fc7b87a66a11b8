"""Clients that write and read without a pause while things break, and write down what they asked and were told."""

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.chaos.checks.history import UNKNOWN, History
from tests.outcomes import error_name

STRONG, WEAK = "strong", "weak"  # topics written with acks=all, and with acks=1
PARTITIONS = {STRONG: 6, WEAK: 3}
PAYLOAD_BYTES = 100
IN_FLIGHT_MAX = 40  # per producer and partition
PACE_S = 0.02
SEGMENT_BYTES = 262_144  # so that rolled segments are in it too

# Clients notice a dead or silent broker about as fast as the cluster does.
CLIENT = {
    "log_level": 0,
    "reconnect.backoff.max.ms": 200,
    "reconnect.backoff.ms": 20,
    "retry.backoff.ms": 50,
    "socket.connection.setup.timeout.ms": 1500,
    "socket.timeout.ms": 2500,
    "topic.metadata.refresh.fast.interval.ms": 100,
}
#: The security settings of clients, unless a campaign gives them others.
PLAINTEXT: Mapping[str, str] = {}
PRODUCER = {
    **CLIENT,
    "debug": "eos",
    "log_level": 7,
    "linger.ms": 2,
    "message.timeout.ms": 90_000,
    "request.timeout.ms": 2000,
}
NEVER_SENT = {KafkaError._PURGE_QUEUE, KafkaError._QUEUE_FULL, KafkaError.MSG_SIZE_TOO_LARGE}


class Progress:
    """What has been achieved so far: the measure of whether a fault hit anything, and of what it cost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acknowledged = 0
        self.delivered = 0
        self.committed = 0
        self.troubles: Counter[str] = Counter()
        self._last_s: dict[tuple[str, int], float] = {}
        self._worst_s = 0.0

    def acknowledge(self, topic: str, rows: list[list[int]]) -> None:
        now = time.monotonic()
        with self._lock:
            self.acknowledged += len(rows) if topic == STRONG else 0
            for at in {(topic, row[0]) for row in rows}:
                self._worst_s = max(self._worst_s, now - self._last_s.get(at, now))
                self._last_s[at] = now

    def deliver(self, count: int) -> None:
        with self._lock:
            self.delivered += count

    def commit(self, count: int) -> None:
        with self._lock:
            self.committed += count

    def counts(self) -> tuple[int, int, int]:
        """Acknowledged with acks=all, delivered, committed by the group."""
        return self.acknowledged, self.delivered, self.committed

    def trouble(self, what: str) -> None:
        with self._lock:
            self.troubles[what] += 1

    def silent_since(self, moment_s: float) -> list[str]:
        """Partitions that have acknowledged nothing after that moment."""
        wanted = [(topic, n) for topic, count in PARTITIONS.items() for n in range(count)]
        with self._lock:
            return [f"{topic}-{n}" for topic, n in wanted if self._last_s.get((topic, n), 0.0) <= moment_s]

    def take_worst_s(self) -> float:
        """The longest that any partition went without an acknowledgement, since this was last asked."""
        with self._lock:
            worst, self._worst_s = self._worst_s, 0.0
        return worst


class ClientGaveUp(Exception):
    """A client that may not go on: the cluster has broken a promise to it."""


class Client:
    """A thread that does its rounds until it is told to end; an error that no round expects ends the campaign."""

    def __init__(self, name: str, history: History, progress: Progress) -> None:
        self.name = name
        self.history = history
        self.progress = progress
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise AssertionError(f"{self.name} has not ended within {timeout_s:g} s")
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError(f"{self.name} has failed") from self.failure

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.failure = error

    def work(self) -> None:
        raise NotImplementedError

    def heard(self, error: KafkaError) -> None:
        """Callback of the client library for what goes wrong in the background."""
        self.progress.trouble(f"{self.name.split('-')[0]}: {error_name(error)}")


class Writer(Client):
    """A producer of values that no other has, a few to every partition in each round."""

    def __init__(
        self,
        number: int,
        topic: str,
        servers: str,
        history: History,
        progress: Progress,
        security: Mapping[str, str] = PLAINTEXT,
    ) -> None:
        super().__init__(f"{topic}-writer-{number}", history, progress)
        self._security = security
        self._topic = topic
        self._servers = servers
        self._next = number << 40
        self._in_flight: Counter[int] = Counter()
        self._done: dict[str, list[list[int]]] = {"ok": [], "fail": [], "info": []}
        self.fatal: list[str] = []
        self._producer = self._connect()

    def _connect(self) -> Producer:
        promise = {"acks": "all", "enable.idempotence": True} if self._topic == STRONG else {"acks": 1}
        settings = {
            **PRODUCER,
            **self._security,
            **promise,
            "bootstrap.servers": self._servers,
            "error_cb": self._erred,
        }
        return Producer(settings, logger=_diary(self.name, self.history.path.with_name(f"{self.name}.log")))

    def _erred(self, error: KafkaError) -> None:
        self.heard(error)
        if error.fatal():
            self.failure = ClientGaveUp(f"{self.name}: {error.str()}")
            self.fatal.append(error.str())

    def work(self) -> None:
        while not self.stopping.is_set() and not self.fatal:
            try:
                self._burst()
            except KafkaException as error:
                self._erred(error.args[0])
            self._producer.poll(PACE_S)
            self._report()
        self._finish()

    def _burst(self) -> None:
        rows = []
        for partition in range(PARTITIONS[self._topic]):
            if self._in_flight[partition] < IN_FLIGHT_MAX:
                self._next += 1
                rows.append([partition, self._next])
        if rows:
            self.history.add(self.name, "invoke", "send", self._topic, rows)
        for partition, value in rows:
            self._in_flight[partition] += 1
            self._producer.produce(
                self._topic,
                b"%d" % value + b" " * PAYLOAD_BYTES,
                key=b"%d" % partition,
                partition=partition,
                on_delivery=self._outcome(partition, value),
            )

    def _outcome(self, partition: int, value: int) -> Callable[[KafkaError | None, Message], None]:
        def told(error: KafkaError | None, message: Message) -> None:
            self._in_flight[partition] -= 1
            if error is None:
                offset = message.offset()
                self._done["ok"].append([partition, UNKNOWN if offset is None else offset, value])
            else:
                self.progress.trouble(f"{self._topic} send: {error.name()}")
                self._done["fail" if error.code() in NEVER_SENT else "info"].append([partition, value])

        return told

    def _report(self) -> None:
        for kind, rows in self._done.items():
            if rows:
                self._done[kind] = []
                self.history.add(self.name, kind, "send", self._topic, rows)  # type: ignore[arg-type]
                if kind == "ok":
                    self.progress.acknowledge(self._topic, rows)

    def _finish(self) -> None:
        deadline = time.monotonic() + 60
        while len(self._producer) and time.monotonic() < deadline:
            self._producer.poll(0.1)
            self._report()
        self._producer.purge(in_queue=True, in_flight=True)
        self._producer.flush(5)
        self._report()


def _diary(name: str, path: Path) -> logging.Logger:
    """What a producer did about its sequence numbers: the first question when a value is there twice."""
    logger = logging.Logger(name)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger


def create_topics(
    servers: str,
    replicas: int,
    partitions: Mapping[str, int] = PARTITIONS,
    security: Mapping[str, str] = PLAINTEXT,
    **more: str,
) -> None:
    """`more` are settings of the topics, with _ for each dot."""
    admin = AdminClient({**CLIENT, **security, "bootstrap.servers": servers})
    settings = {"segment.bytes": str(SEGMENT_BYTES), "min.insync.replicas": str(min(2, replicas))}
    settings |= {name.replace("_", "."): value for name, value in more.items()}
    wanted = [NewTopic(topic, count, replicas, config=settings) for topic, count in partitions.items()]
    for future in admin.create_topics(wanted, operation_timeout=20, request_timeout=20).values():
        with contextlib.suppress(_AlreadyThere):
            _result(future)


class _AlreadyThere(Exception):
    """The first attempt has worked, only its answer was lost."""


def _result(future: Any) -> None:
    try:
        future.result(30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
        raise _AlreadyThere from error


def pick(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]
