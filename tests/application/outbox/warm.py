"""Consumers that are used again: the library takes half a second before a new one reads anything."""

from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

SETTINGS = {"enable.partition.eof": True, "fetch.wait.max.ms": 20, "enable.auto.commit": False}
READ_S = 20.0


class WarmReaders:
    """Each reads for one at a time. `close` ends the reading, and keeps the consumer for the next."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[Any]] = {}
        self._all: list[Any] = []

    def reader(self, bootstrap: str, isolation: str = "read_committed") -> Any:
        idle = self._idle.setdefault((bootstrap, isolation), [])
        if idle:
            return Lease(idle.pop(), idle)
        settings = {
            "bootstrap.servers": bootstrap,
            "isolation.level": isolation,
            "group.id": "warm",
            **SETTINGS,
        }
        self._all.append(Consumer(settings))
        return Lease(self._all[-1], idle)

    def consumer_of(self, settings: dict[str, Any], name: str, *, isolation: str) -> Any:
        """In place of the relay's own."""
        return self.reader(settings["bootstrap.servers"], isolation)

    def messages(self, bootstrap: str, topic: str) -> list[Any]:
        """All that is committed."""
        reader = self.reader(bootstrap)
        try:
            partitions = reader.list_topics(topic, timeout=READ_S).topics[topic].partitions
            reader.assign([TopicPartition(topic, partition, 0) for partition in partitions])
            return _to_the_end(reader, len(partitions))
        finally:
            reader.close()

    def close(self) -> None:
        for each in self._all:
            each.close()


class Lease:
    def __init__(self, consumer: Any, home: list[Any]) -> None:
        self._consumer, self._home = consumer, home

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def close(self) -> None:
        self._consumer.unassign()
        self._home.append(self._consumer)


def _to_the_end(reader: Any, partitions: int) -> list[Any]:
    found = []
    while partitions:
        message = reader.poll(READ_S)
        assert message is not None, f"{partitions} partitions are not read to their end"
        if message.error() is None:
            found.append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            partitions -= 1
    return found
