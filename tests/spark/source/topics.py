"""Topics for tests of the source, written by a real client, and the expected content."""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.compat import confluent
from tests.compat.message import Message

from penstock.client.wire.cluster import Cluster
from penstock.spark.source.options import SourceOptions

#: Short, because a single broker never has old metadata.
SETTINGS = {"kafka.topic.metadata.propagation.max.ms": "300"}


class Topics:
    """Creates, fills, extends, trims and deletes topics of one broker."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def create(self, name: str, partitions: int = 1, **settings: str) -> str:
        return confluent.create_topic(self.admin, name, partitions, settings)

    def fill(self, topic: str, messages: Iterable[Message], codec: str = "none") -> None:
        confluent.publish(self.bootstrap, topic, messages, codec)

    def count(self, topic: str, numbers: Iterable[int], partition: int = 0) -> None:
        """Write records whose values are numbers."""
        self.fill(topic, [Message(value=b"%d" % number, partition=partition) for number in numbers])

    def commit_abort_commit(self, topic: str, transactional_id: str) -> Any:
        """Three transactions with the values 0, 1 and 2, of which the second is aborted. Returns the producer."""
        producer = confluent.producer(self.bootstrap, transactional_id=transactional_id)
        producer.init_transactions(20)
        for number, is_kept in enumerate([True, False, True]):
            producer.begin_transaction()
            producer.produce(topic, value=b"%d" % number)
            producer.flush(60)
            (producer.commit_transaction if is_kept else producer.abort_transaction)(20)
        return producer

    def grow(self, topic: str, partitions: int) -> None:
        confluent.add_partitions(self.admin, topic, partitions)

    def trim(self, topic: str, before: int, partition: int = 0) -> None:
        for future in self.admin.delete_records([TopicPartition(topic, partition, before)]).values():
            future.result(60)

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(60)

    def given(self, **options: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.bootstrap, **SETTINGS, **options}

    def options(self, *, streaming: bool = True, **options: str) -> SourceOptions:
        return SourceOptions.parse(self.given(**options), streaming=streaming)

    def cluster(self) -> Cluster:
        return Cluster(self.options(subscribe="unused").connection)


def numbers(rows: Iterable[Any]) -> list[int]:
    return sorted(int(row["value"]) for row in rows)
