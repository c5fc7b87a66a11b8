"""Step 2: the annotation says what an order is. `python examples/migrating/step2_payload.py [HOST:PORT]`.

What is none becomes a dead letter that tells which field does not fit; parsing is not ours any more.
"""

import sys
from dataclasses import dataclass

from penstock.client import Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")


@dataclass
class Order:
    id: int
    customer: str


@app.subscribe("shop.orders", group="billing")
def bill(order: Order) -> None:
    print(f"billed order {order.id} of {order.customer}", flush=True)


if __name__ == "__main__":
    app.run()
