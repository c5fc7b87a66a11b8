"""An application: `python examples/billing_app.py [HOST:PORT]` bills four orders. One fails once, one fails every time.

The contract is at-least-once. A failed order waits in `billing.orders.retry.1`, then in `billing.orders.retry.2`, while
others continue. After the last attempt it is a dead letter in `billing.orders.dlq`, which
`penstock dlq show billing.orders.dlq 0:0` shows.
"""

import sys
import time
from dataclasses import dataclass

from penstock.client import Backoff, Message, Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", name="billing-app")


@dataclass
class Order:
    id: int
    customer: str
    total: float


@app.subscribe("billing.orders", group="billing-app", retry=Backoff(base="100ms", cap="5s", attempts=3))
def bill(order: Order, message: Message) -> None:
    print(f"order {order.id} of {order.customer}, attempt {message.attempt}", flush=True)
    if order.customer == "bob" and message.attempt == 1:
        raise ConnectionError("the bank does not answer")
    if order.customer == "mallory":
        raise RuntimeError("the card is refused")


def main() -> None:
    """Publish, then handle. A service would call app.run(), which runs until SIGTERM."""
    with app:
        for number, customer in enumerate(("alice", "bob", "mallory", "carol")):
            place = app.publish("billing.orders", Order(number, customer, 9.5), key=customer)
            print(f"order {number} has offset {place.offset}")
        app.start()
        figures = app.figures()["bill"]
        while figures.handled < 3 or figures.dead < 1:
            time.sleep(0.05)
    print(f"handled {figures.handled}, retried {figures.retried}, dead {figures.dead}")


if __name__ == "__main__":
    main()
