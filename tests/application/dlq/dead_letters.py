"""Dead letters as applications and share groups write them, and what read_committed readers see."""

from collections.abc import Iterable
from typing import Any

from confluent_kafka.admin import AdminClient
from tests.compat import confluent
from tests.compat.message import Message

from penstock.client.deadletters.headers import Failure, Header, Origin, dead_letter_topic, failure_headers
from penstock.client.deadletters.reader import read_records, settled_offset_ranges
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.dead_letter_headers import HANDLER_HEADER
from penstock.protocol.record_batch import Record

#: What is gone is told of quickly: a single broker has heard of everything.
QUICK = {"topic.metadata.propagation.max.ms": "300"}
OWN: tuple[Header, ...] = (("trace", b"abc"), ("none", None))
MOMENT_MS = 1_700_000_000_000


def letter(
    topic: str,
    number: int,
    *,
    partition: int = 0,
    error: str = "shop.errors.NoSuchColour",
    group: str = "billing",
    handler: str | None = None,
    dead_in: int = 0,
    **more: Any,
) -> Message:
    origin = Origin(topic=topic, partition=partition, offset=number, timestamp_ms=MOMENT_MS + number)
    failure = Failure(error_class=error, message=f"no {number}\nat all", stack="Traceback ...\nboom")
    headers = failure_headers(OWN, origin, failure, group=group, attempts=5)
    if handler is not None:
        headers.append((HANDLER_HEADER, handler.encode()))
    fields = {"value": b"%d" % number, "key": b"k%d" % number, "timestamp_ms": None, **more}
    return Message(headers=tuple(headers), partition=dead_in, **fields)


class Office:
    """Topics of one broker."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def create(self, name: str, partitions: int = 1, **settings: str) -> str:
        return confluent.create_topic(self.admin, name, partitions, settings)

    def create_dead(self, topic: str, partitions: int = 1) -> str:
        return self.create(dead_letter_topic(topic), partitions)

    def fill(self, topic: str, messages: Iterable[Message], codec: str = "none") -> None:
        confluent.publish(self.bootstrap, topic, messages, codec)

    def cluster(self) -> Cluster:
        return Cluster(ConnectionSettings.parse({"bootstrap.servers": self.bootstrap, **QUICK}))

    def read(self, topic: str) -> list[tuple[int, Record]]:
        """Partitions and records that are committed, once nothing is undecided."""
        with self.cluster() as cluster:
            info = cluster.await_topic(topic)
            return [
                (span.partition, record)
                for span in settled_offset_ranges(cluster, info)
                for record in read_records(cluster, info, span)
            ]

    def numbers(self, topic: str) -> list[int]:
        return sorted(int(record.value or b"-1") for _, record in self.read(topic))
