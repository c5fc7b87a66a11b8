"""Step 2: a type annotation describes an order. `python examples/migrating/step2_payload.py [HOST:PORT]`.

A message that is not a valid order becomes a dead letter that names the invalid field.
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
