"""Each bill once: `python examples/effectively_once_postgres.py [HOST:PORT] [postgresql://user@host/database]`.

The handler writes through the connection that it gets. The bill and the id of the message are one transaction, so an
order that is published twice, or delivered again after a crash, is billed once. Without a URL the database is the
SQLite file bills.db.
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
#: The placeholder of a parameter in the SQL of the driver.
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
        raise ConnectionError("the printer does not answer")  # rolls back the INSERT


def bills() -> list[tuple[int, float]]:
    with store.transaction() as transaction:
        return [tuple(row) for row in transaction.connection.execute("SELECT * FROM bills ORDER BY id")]


def main() -> None:
    with store.transaction() as transaction:
        transaction.connection.execute("CREATE TABLE IF NOT EXISTS bills (id INTEGER, total REAL)")
    with app:
        for number in (1, 2, 3, 1, 3):  # some twice, like a publisher that retries
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
