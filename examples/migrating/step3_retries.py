"""Step 3: retries and dead letters. `python examples/migrating/step3_retries.py [HOST:PORT]`.

A failed order waits in `shop.orders.retry.1` while others continue, and becomes a dead letter after three attempts.
"""

import sys
from dataclasses import dataclass

from penstock.client import Backoff, Message, Penstock, Reject

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")


@dataclass
class Order:
    id: int
    customer: str


@app.subscribe("shop.orders", group="billing", retry=Backoff(base="100ms", cap="1m", attempts=3))
def bill(order: Order, message: Message) -> None:
    if order.id < 0:
        raise Reject("there is no such order")  # another attempt would not help
    if order.customer == "c1" and message.attempt == 1:
        raise ConnectionError("the bank does not answer")
    print(f"billed order {order.id} of {order.customer}, attempt {message.attempt}", flush=True)


if __name__ == "__main__":
    app.run()
