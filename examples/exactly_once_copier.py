"""Copies a topic in transactions: `python examples/exactly_once_copier.py [HOST:PORT]` doubles ten numbers and ends.

Results and consumed offsets are committed together. If the copier is killed at any point, start it again and it
continues: a `read_committed` consumer sees each result once.
"""

import sys

from confluent_kafka import Consumer, KafkaException, Producer

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
COUNT = 10


def transform(value: bytes) -> bytes:
    return b"%d" % (2 * int(value))


def copy_some(consumer: Consumer, producer: Producer) -> int:
    """Copy a batch in one transaction, and return its number of messages."""
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
            raise  # fenced: another copier has taken over
        producer.abort_transaction()
        raise SystemExit("aborted: start it again to continue") from error
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
    # A copier that starts with this id fences the previous one.
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
