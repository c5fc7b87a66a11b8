"""Runs pipelines until everything is read, and reads the topics with another client."""

import json
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, TopicPartition
from tests.compat import confluent
from tests.compat.message import Message
from tests.spark.sink.readers import await_rest
from tests.spark.source.topics import SETTINGS, Topics

from penstock.spark.pipelines.assembly import start
from penstock.spark.pipelines.declaration import Pipeline, RunSettings

WITHIN_S = 600.0


class Line:
    """The topics of a broker, a session, and a folder for checkpoints."""

    def __init__(self, spark: Any, topics: Topics, folder: Path) -> None:
        self.spark, self.topics, self.folder = spark, topics, folder

    def settings(self, pipeline: Pipeline, **changed: Any) -> RunSettings:
        quick = {name.removeprefix("kafka."): value for name, value in SETTINGS.items()}
        given = {"checkpoint": str(self.folder / pipeline.name), "connection": quick, "once": True}
        return RunSettings(bootstrap=self.topics.bootstrap, **given | changed)

    def run(self, pipeline: Pipeline, **changed: Any) -> None:
        """Run until everything that was there at the start is read, or the pipeline fails."""
        queries = start(self.spark, pipeline, self.settings(pipeline, **changed))
        try:
            for query in queries:
                assert query.awaitTermination(WITHIN_S)
        finally:
            for query in queries:
                query.stop()

    def put(self, topic: str, *values: Any, partition: int = 0) -> None:
        """Publish bytes as they are, and everything else as JSON. Keys are the numbers of the values."""
        self.topics.fill(
            topic,
            [
                Message(
                    key=b"%d" % number,
                    value=value if isinstance(value, bytes | None) else json.dumps(value).encode(),
                    partition=partition,
                    headers=(("own", b"header"),),
                )
                for number, value in enumerate(values)
            ],
        )

    def messages(self, topic: str) -> list[Message]:
        """Return all committed records, or none if the topic does not exist."""
        with self.topics.cluster() as cluster:
            found = cluster.topics([topic]).get(topic)
            if found is None:
                return []
            partitions = [(topic, part.index) for part in found.partitions]
            await_rest(cluster, partitions)
        return read_committed(self.topics.bootstrap, topic, len(partitions))

    def rows(self, topic: str) -> list[Any]:
        return [json.loads(each.value) for each in self.messages(topic)]


def read_committed(bootstrap: str, topic: str, partitions: int) -> list[Message]:
    client = confluent.consumer(bootstrap, isolation_level="read_committed", enable_partition_eof=True)
    found: list[Message] = []
    try:
        confluent.assign(client, [TopicPartition(topic, index, 0) for index in range(partitions)])
        ended = 0
        while ended < partitions:
            message = client.poll(WITHIN_S)
            assert message is not None, f"{topic} has no end"
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended += 1
            else:
                found.append(confluent._received(message).message)
    finally:
        client.close()
    return found
