"""Results and offsets in one database: `python examples/exactly_once_ledger.py [HOST:PORT] [postgresql://...]`.

The group's offsets are in the same database as its results, and change in the same transaction. A member that was
fenced and still runs changes nothing, because its transactions fail. Without a URL the database is the SQLite file
totals.db.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

from penstock.client import Penstock
from penstock.client.ledgers import open_ledger

given = dict(enumerate(sys.argv))
app = Penstock(given.get(1, "localhost:9092"), name="totals")
url = given.get(2, "sqlite:///totals.db")
ledger = open_ledger(url)
PARAMETER = "%s" if url.startswith("postgres") else "?"
SALES = 20


@dataclass
class Sale:
    product: str
    amount: int


@app.subscribe("sales", group="totals", delivery="exactly-once", ledger=ledger)
def add(sale: Sale, connection: Any) -> None:
    connection.execute(
        f"INSERT INTO totals VALUES ({PARAMETER}, {PARAMETER}) "
        "ON CONFLICT (product) DO UPDATE SET amount = totals.amount + excluded.amount",
        (sale.product, sale.amount),
    )


def totals() -> dict[str, int]:
    with ledger.transaction() as transaction:
        return dict(transaction.connection.execute("SELECT product, amount FROM totals").fetchall())


def main() -> None:
    with ledger.transaction() as transaction:
        transaction.connection.execute(
            "CREATE TABLE IF NOT EXISTS totals (product TEXT PRIMARY KEY, amount INTEGER)"
        )
    with app:
        for number in range(SALES):
            app.publish("sales", Sale("apples" if number % 2 else "bread", 1), key=str(number))
        app.start()
        while app.figures()["add"].handled < SALES:
            time.sleep(0.05)
    for product, amount in sorted(totals().items()):
        print(f"{product}: {amount}")
    ledger.close()


if __name__ == "__main__":
    main()
