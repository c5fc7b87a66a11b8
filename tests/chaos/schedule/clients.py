"""Who writes what is to be delivered later, and who reads it: groups of every kind, and newcomers in the end."""

import random
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from tests.chaos.checks.history import UNKNOWN, History
from tests.chaos.readers import BATCH, CONSUMER, WAIT_S, read_whole
from tests.chaos.schedule.judge import Got, Ledger, Sent
from tests.chaos.share_consumers import share_consumer, stored_partitions
from tests.chaos.workload import PRODUCER, Client, Progress
from tests.compat.share import ACCEPT

TOPIC, PARTITIONS = "jobs", 3
CLASSIC, CONSUMERS, SHARE = "classic", "consumers", "sharers"
GROUPS = (CLASSIC, CONSUMERS, SHARE)
NEWCOMERS = ("read_committed", "read_uncommitted")
UNHELD = 0.1  # so many are not to be held at all
BY_TIME = 0.3  # so many name a time, the others a delay
IN_FLIGHT_MAX = 400
PAUSE_S = 0.01
BURST = 4
CALL_S = 10.0
# No diary: what goes in is not what is tested here.
IDEMPOTENT = {
    **{name: value for name, value in PRODUCER.items() if name != "debug"},
    "enable.idempotence": True,
    "log_level": 0,
}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Writer(Client):
    """Numbers without a gap, each to one partition, most of them to be delivered later."""

    def __init__(
        self,
        servers: str,
        history: History,
        progress: Progress,
        ledger: Ledger,
        *,
        seed: int,
        delay_ms_max: int,
    ) -> None:
        super().__init__("writer", history, progress)
        self._delay_ms_max = delay_ms_max
        self._ledger = ledger
        self._chance = random.Random(seed)
        self._producer = Producer({**IDEMPOTENT, "bootstrap.servers": servers, "error_cb": self.heard})

    def work(self) -> None:
        while not self.stopping.is_set():
            for _ in range(BURST):
                self._send()
            self._producer.poll(PAUSE_S)
            while len(self._producer) > IN_FLIGHT_MAX:
                self._producer.poll(PAUSE_S)
        left = self._producer.flush(120)
        assert left == 0, f"{left} messages were never answered"

    def _send(self) -> None:
        number, sent_ms, held = len(self._ledger.sent), now_ms(), self._chance.random()
        delay_ms = self._chance.randrange(self._delay_ms_max)
        headers: list[tuple[str, bytes]] = []
        if held > UNHELD + BY_TIME:
            headers = [("penstock-deliver-after", b"%d" % delay_ms)]
        elif held > UNHELD:
            headers = [("penstock-deliver-at", b"%d" % (sent_ms + delay_ms))]
        partition = number % PARTITIONS
        self._ledger.sent[number] = Sent(partition, sent_ms + delay_ms if headers else 0)
        self._producer.produce(
            TOPIC, b"%d" % number, partition=partition, headers=headers, on_delivery=self._told(number)
        )

    def _told(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        def told(error: KafkaError | None, message: Message) -> None:
            if error is None:
                with self._ledger.lock:
                    self._ledger.acknowledged[number] = None
                self.history.add(
                    self.name,
                    "ok",
                    "send",
                    TOPIC,
                    [[number % PARTITIONS, message.offset() or UNKNOWN, number]],
                )
            else:
                self.progress.trouble(f"send: {error.name()}")

        return told


class Reader(Client):
    """Whatever it reads, it tells the ledger under the name of its group."""

    def __init__(
        self, name: str, group: str, servers: str, history: History, progress: Progress, ledger: Ledger
    ) -> None:
        super().__init__(name, history, progress)
        self.group = group
        self.servers = servers
        self.ledger = ledger

    def take(self, messages: list[Any]) -> list[Got]:
        at_ms = now_ms()
        rows = [_got(message, at_ms) for message in messages if message.error() is None]
        for message in messages:
            if (error := message.error()) is not None:
                self.progress.trouble(f"{self.group}: {error.name()}")
        if rows:
            self.history.add(self.name, "ok", "poll", TOPIC, [list(row) for row in rows])
            self.ledger.give(self.group, rows)
        return rows


class Member(Reader):
    """Of a classic group, or of one of the newer protocol (KIP-848)."""

    def work(self) -> None:
        classic = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 1000}
        newer = {"group.protocol": "consumer"}
        consumer = Consumer(
            {
                **CONSUMER,
                **(newer if self.group == CONSUMERS else classic),
                "bootstrap.servers": self.servers,
                "enable.auto.commit": True,
                "auto.commit.interval.ms": 500,
                "group.id": self.group,
            }
        )
        consumer.subscribe([TOPIC])
        while not self.stopping.is_set():
            self.take(consumer.consume(BATCH, WAIT_S))
        consumer.close()


class Sharer(Reader):
    """Accepts all that it gets, and may not be given again what was known to be accepted before it asked."""

    def work(self) -> None:
        client = share_consumer(self.servers, self.group, TOPIC)
        while not self.stopping.is_set():
            try:
                self._round(client)
            except KafkaException as error:
                self.heard(error.args[0])
        client.close()

    def _round(self, client: Any) -> None:
        accepted = self.ledger.accepted[self.group]
        with self.ledger.lock:
            known = frozenset(accepted)
        messages = list(client.poll(WAIT_S))
        rows = self.take(messages)
        for row in rows:
            if row.number in known:
                self.ledger.again.append(f"{self.group} had accepted {row.number}, and was given {row}")
            client.acknowledge_offset(TOPIC, row.partition, row.offset, ACCEPT)
        stored = stored_partitions(client, CALL_S)
        with self.ledger.lock:
            accepted.update(row.number for row in rows if row.partition in stored)


class Newcomer(Reader):
    """When everything is over: all that there is, for this isolation level."""

    def work(self) -> None:
        self.take(read_whole(self.servers, TOPIC, self.group))


def _got(message: Message, at_ms: int) -> Got:
    value, partition, offset = message.value(), message.partition(), message.offset()
    assert value is not None
    assert partition is not None
    assert offset is not None
    return Got(int(value), partition, offset, message.timestamp()[1], at_ms)
