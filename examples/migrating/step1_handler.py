"""Step 1: the body of the loop becomes a handler. `python examples/migrating/step1_handler.py [HOST:PORT]`.

The group is the same, so it continues where the loop stopped. The application takes care of polling, commits,
rebalances and signals.
"""

import json
import sys
from typing import Any

from penstock.client import Message, Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")


def bill(order: dict[str, Any]) -> None:
    print(f"billed order {order['id']} of {order['customer']}", flush=True)


@app.subscribe("shop.orders", group="billing")
def handle(message: Message) -> None:
    bill(json.loads(message.value or b""))


if __name__ == "__main__":
    app.run()
