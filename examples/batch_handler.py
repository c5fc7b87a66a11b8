"""A handler of batches: `python examples/batch_handler.py [HOST:PORT]` writes 250 readings to a SQLite file.

The handler gets lists. If a list fails, the application halves it until it finds the failing message, and only that
one becomes a dead letter. The handler can therefore see a message more than once; here each reading has a number, so
that a repetition changes nothing.
"""

import sqlite3
import sys
import time
from dataclasses import dataclass

from penstock.client import Penstock

app = Penstock(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092", name="readings")
database = sqlite3.connect(sys.argv[2] if len(sys.argv) > 2 else "readings.db", check_same_thread=False)
database.execute("CREATE TABLE IF NOT EXISTS readings (number INTEGER PRIMARY KEY, celsius REAL)")
COUNT = 250


@dataclass
class Reading:
    number: int
    celsius: float


@app.subscribe("readings", group="archive", batch=100)
def keep(readings: list[Reading]) -> None:
    with database:  # all or none
        rows = [(each.number, each.celsius) for each in readings]
        database.executemany("INSERT INTO readings VALUES (?, ?) ON CONFLICT DO NOTHING", rows)
        if any(each.celsius < -273.15 for each in readings):
            raise ValueError("below absolute zero")


def main() -> None:
    with app:
        sent = [
            app.publish_soon("readings", Reading(number, -300.0 if number == 131 else 20.0))
            for number in range(COUNT)
        ]
        for each in sent:
            each.result()  # raises if it was not published
        app.start()
        figures = app.figures()["keep"]
        while figures.handled + figures.dead < COUNT:
            time.sleep(0.05)
    (kept,) = database.execute("SELECT count(*) FROM readings").fetchone()
    print(f"{kept} readings are kept, {figures.dead} is a dead letter")


if __name__ == "__main__":
    main()
