"""Step 4: each order once. `python examples/migrating/step4_once.py [HOST:PORT] [postgresql://...]`.

The result and the message id are one database transaction. Without a URL the database is a SQLite file. You no longer
need your own table of processed ids.
"""

import sys
from dataclasses import dataclass
from typing import Any

from penstock.client import Backoff, Penstock
from penstock.client.stores import open_store

given = dict(enumerate(sys.argv))
app = Penstock(given.get(1, "localhost:9092"))
url = given.get(2, "sqlite:///billing.db")
store = open_store(url)
PARAMETER = "%s" if url.startswith("postgres") else "?"


@dataclass
class Order:
    id: int
    customer: str


@app.subscribe(
    "shop.orders",
    group="billing",
    delivery="effectively-once",
    store=store,
    retry=Backoff(base="100ms", cap="1m", attempts=3),
)
def bill(order: Order, connection: Any) -> None:
    connection.execute(f"INSERT INTO bills VALUES ({PARAMETER}, {PARAMETER})", (order.id, order.customer))
    print(f"billed order {order.id} of {order.customer}", flush=True)


if __name__ == "__main__":
    with store.transaction() as transaction:
        transaction.connection.execute("CREATE TABLE IF NOT EXISTS bills (id INTEGER, customer TEXT)")
    app.run()
    store.close()
