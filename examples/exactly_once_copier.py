"""Copies a topic in transactions: `python examples/exactly_once_copier.py [HOST:PORT]` doubles ten numbers and ends.

What is written and how far was read are committed together, or not at all. A copier that is killed at any point is
started again and goes on: whoever reads `read_committed` sees each result once.
"""

import sys

from confluent_kafka import Consumer, KafkaException, Producer

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
COUNT = 10


def transform(value: bytes) -> bytes:
    return b"%d" % (2 * int(value))


def copy_some(consumer: Consumer, producer: Producer) -> int:
    """One transaction; returns how many messages were in it."""
    messages = [message for message in consumer.consume(100, timeout=1.0) if message.error() is None]
    if not messages:
        return 0
    producer.begin_transaction()
    try:
        for message in messages:
            producer.produce("doubled", key=message.key(), value=transform(message.value()))
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction()
    except KafkaException as error:
        if not error.args[0].txn_requires_abort():
            raise  # this producer was fenced: another copier has taken over
        producer.abort_transaction()
        raise SystemExit("aborted: start again, and it goes on where it was") from error
    return len(messages)


def publish_numbers() -> None:
    plain = Producer({"bootstrap.servers": bootstrap})
    for number in range(COUNT):
        plain.produce("numbers", value=str(number))
    plain.flush()


def read_doubled() -> list[int]:
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "readers-of-doubled",
        "auto.offset.reset": "earliest",
    }
    reader = Consumer(settings | {"isolation.level": "read_committed"})
    reader.subscribe(["doubled"])
    found: list[int] = []
    while len(found) < COUNT:
        found += [
            int(message.value()) for message in reader.consume(COUNT, timeout=1.0) if not message.error()
        ]
    reader.close()
    return found


if __name__ == "__main__":
    publish_numbers()
    # The id names this place in the pipeline: who starts with it fences whoever had it before.
    copier = Producer({"bootstrap.servers": bootstrap, "transactional.id": "doubler-1"})
    copier.init_transactions()
    source = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "doublers",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    source.subscribe(["numbers"])
    copied = 0
    while copied < COUNT:
        copied += copy_some(source, copier)
    source.close()
    print(*read_doubled())
