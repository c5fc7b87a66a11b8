"""Reads everything that is in a topic at the end of a campaign."""

import time

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from tests.chaos.readers import BATCH, CONSUMER, FINAL_READING_S, WAIT_S


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
