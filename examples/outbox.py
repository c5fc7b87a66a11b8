"""An order and its message are one database transaction; a relay publishes committed messages, each once.

    python examples/outbox.py localhost:9092

In production the relay is a separate process: penstock outbox relay --database sqlite:///shop.db
"""

import sqlite3
import sys
import tempfile
from pathlib import Path

from confluent_kafka import Consumer

from penstock.client import outbox

bootstrap = sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"
path = Path(tempfile.mkdtemp()) / "shop.db"
shop = sqlite3.connect(path)
with shop:
    outbox.create_table(shop)
    shop.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, customer TEXT, item TEXT)")


def order(customer: str, item: str, *, in_stock: bool = True) -> None:
    with shop:  # commits, or rolls back if the block raises
        number = shop.execute("INSERT INTO orders (customer, item) VALUES (?, ?)", (customer, item)).lastrowid
        outbox.add(shop, "outbox.orders", {"number": number, "item": item}, key=customer)
        if not in_stock:
            raise LookupError(f"{item}: out of stock")


order("ada", "compass")
try:
    order("grace", "sextant", in_stock=False)
except LookupError as error:
    print(f"rolled back: {error}")
order("ada", "lantern")

relay = outbox.Relay(f"sqlite:///{path}", bootstrap, name=f"example-{path.parent.name}")
print(f"relayed: {relay.run(once=True).relayed}")

consumer = Consumer(
    {"bootstrap.servers": bootstrap, "group.id": path.parent.name, "auto.offset.reset": "earliest"}
)
consumer.subscribe(["outbox.orders"])
for _ in range(2):
    message = consumer.poll(30)
    assert message is not None, "the broker did not answer"
    print(f"{message.key().decode()}: {message.value().decode()}")
consumer.close()
