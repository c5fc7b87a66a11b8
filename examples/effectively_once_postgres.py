"""Each bill once: `python examples/effectively_once_postgres.py [HOST:PORT] [postgresql://user@host/database]`.

The handler writes through the connection that it is given, and the mark that an order is done is in the same
transaction: both are there, or neither. An order that is published twice, or comes again after a crash, changes
nothing. Without a URL the database is the file bills.db, in SQLite.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

from penstock.client import Backoff, Message, Penstock
from penstock.client.stores import open_store

given = dict(enumerate(sys.argv))
app = Penstock(given.get(1, "localhost:9092"), name="bills")
url = given.get(2, "sqlite:///bills.db")
store = open_store(url)
#: How the drivers write a parameter.
PARAMETER = "%s" if url.startswith("postgres") else "?"


@dataclass
class Order:
    id: int
    total: float


@app.subscribe(
    "orders.paid",
    group="bills",
    delivery="effectively-once",
    store=store,
    retry=Backoff(base="100ms", cap="5s", attempts=3),
)
def bill(order: Order, message: Message, connection: Any) -> None:
    connection.execute(f"INSERT INTO bills VALUES ({PARAMETER}, {PARAMETER})", (order.id, order.total))
    if order.id == 2 and message.attempt == 1:
        raise ConnectionError("the printer does not answer")  # and what was just written is taken back


def bills() -> list[tuple[int, float]]:
    with store.transaction() as transaction:
        return [tuple(row) for row in transaction.connection.execute("SELECT * FROM bills ORDER BY id")]


def main() -> None:
    with store.transaction() as transaction:
        transaction.connection.execute("CREATE TABLE IF NOT EXISTS bills (id INTEGER, total REAL)")
    with app:
        for number in (1, 2, 3, 1, 3):  # some twice, as a publisher does that was not sure
            app.publish("orders.paid", Order(number, 9.5), headers={"message-id": f"order-{number}"})
        app.start()
        figures = app.figures()["bill"]
        while figures.duplicates < 2 or len(bills()) < 3:
            time.sleep(0.05)
    for number, total in bills():
        print(f"order {number}: {total:.2f}")
    print(f"{figures.duplicates} came twice")
    store.close()


if __name__ == "__main__":
    main()
