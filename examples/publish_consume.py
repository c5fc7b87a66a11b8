"""Publish and consume with an ordinary Kafka client: `python examples/publish_consume.py [HOST:PORT]`."""

import sys

from confluent_kafka import Consumer, Producer

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"

producer = Producer({"bootstrap.servers": bootstrap})
producer.produce("greetings", key="world", value="hello")
producer.flush()

consumer = Consumer(
    {"bootstrap.servers": bootstrap, "group.id": "greeting-readers", "auto.offset.reset": "earliest"}
)
consumer.subscribe(["greetings"])
message = consumer.poll(10)
print(f"{message.key().decode()}: {message.value().decode()} (offset {message.offset()})")
consumer.close()
