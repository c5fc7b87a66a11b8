"""Test your own code against a real broker: the package provides the `penstock` fixture.

Run it with `pytest examples/pytest_example`; you need not start anything first.
"""

from confluent_kafka import Consumer, Producer


def place_order(bootstrap_servers: str, order: str) -> None:
    """The code under test."""
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce("orders", key=order, value="placed")
    producer.flush()


def test_an_order_is_announced(penstock):
    place_order(penstock.bootstrap_servers, "order-1")

    consumer = Consumer(
        {"bootstrap.servers": penstock.bootstrap_servers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])
    message = consumer.poll(10)
    consumer.close()
    assert (message.key(), message.value()) == (b"order-1", b"placed")
