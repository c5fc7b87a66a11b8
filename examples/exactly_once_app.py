"""Consume, transform, publish, exactly once: `python examples/exactly_once_app.py [HOST:PORT]` writes six invoices.

Everything that the handler returns or publishes, dead letters and the group's offsets are one Kafka transaction. A
handler that fails halfway leaves nothing, and a `read_committed` consumer sees each invoice once.
"""

import sys
import time
from dataclasses import dataclass

from penstock.client import Backoff, Message, Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", name="invoicing")
COUNT = 6
#: What the subscribers of the results have received.
invoices: list["Invoice"] = []
taken: list[dict[str, int]] = []


@dataclass
class Order:
    id: int
    quantity: int


@dataclass
class Invoice:
    order: int
    total: float


@app.subscribe(
    "carts",
    group="invoicing",
    delivery="exactly-once",
    retry=Backoff(base="100ms", attempts=3),
    to="invoices",  # the topic for the return value, with the key of the order
)
def invoice(order: Order, message: Message) -> Invoice:
    app.publish("stock", {"order": order.id, "taken": order.quantity}, key=str(order.id))
    if order.id == 4 and message.attempt == 1:
        raise ConnectionError("the tax office does not answer")  # nothing goes to "stock"
    return Invoice(order.id, 2.5 * order.quantity)


@app.subscribe("invoices", group="readers-of-invoices")
def read(found: Invoice) -> None:
    invoices.append(found)


@app.subscribe("stock", group="readers-of-stock")
def count(change: dict[str, int]) -> None:
    taken.append(change)


def main() -> None:
    with app:
        for topic in ("invoices", "stock"):
            app.create_topic(topic, partitions=1)
        for number in range(COUNT):
            app.publish("carts", Order(number, number + 1), key=str(number))
        app.start()
        while len(invoices) < COUNT or len(taken) < COUNT:
            time.sleep(0.05)
    for each in invoices:
        print(f"invoice of order {each.order}: {each.total:.2f}")
    for change in taken:
        print(f"taken for order {change['order']}: {change['taken']}")


if __name__ == "__main__":
    main()
