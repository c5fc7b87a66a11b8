"""A shop whose every sale is a row and a message in one transaction; its tables tell what must be in the topics."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.client.outbox import add
from penstock.client.outbox.database import create_tables, url_dialect
from penstock.client.outbox.messages import SQLITE

TOPICS = ("orders", "parcels")
KEYS = 12


class Sale(NamedTuple):
    """The `count`-th of its key, so that the order of those of a key can be told."""

    message_id: str
    topic: str
    key: str
    count: int


class Shop:
    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url_dialect(url) == SQLITE

    def prepare(self) -> "Shop":
        create_tables(self.url)
        with self.connected() as connection:
            connection.execute("CREATE TABLE counters (key text PRIMARY KEY, n integer NOT NULL)")
            connection.execute("CREATE TABLE sales (message_id text, topic text, key text, n integer)")
            for number in range(KEYS):
                connection.execute(f"INSERT INTO counters VALUES ('k{number}', 0)")
        return self

    def connect(self) -> Any:
        """A transaction is begun by `begin`, or by itself."""
        if self.is_sqlite:
            path = self.url.removeprefix("sqlite:///")
            return sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        import psycopg

        return psycopg.connect(self.url)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """One transaction, and the end of the connection."""
        connection = self.connect()
        try:
            self.begin(connection)
            yield connection
            connection.commit()
        finally:
            connection.close()

    def begin(self, connection: Any) -> None:
        if self.is_sqlite:
            connection.execute("BEGIN IMMEDIATE")

    def sell(self, connection: Any, key: str, topic: str = TOPICS[0]) -> Sale:
        """In the transaction of `connection`. Sales of a key wait for each other, by their counter."""
        ((count,),) = connection.execute(
            f"UPDATE counters SET n = n + 1 WHERE key = '{key}' RETURNING n"
        ).fetchall()
        value = {"key": key, "count": count}
        sale = Sale(add(connection, topic, value, key=key), topic, key, count)
        connection.execute(f"INSERT INTO sales VALUES ('{sale.message_id}', '{topic}', '{key}', {count})")
        return sale

    def sell_one(self, key: str, topic: str = TOPICS[0]) -> Sale:
        with self.connected() as connection:
            return self.sell(connection, key, topic)

    def sales(self) -> list[Sale]:
        """What was committed."""
        return [Sale(*row) for row in self._rows("SELECT message_id, topic, key, n FROM sales")]

    def waiting(self) -> int:
        """Rows that the relay has not taken away."""
        return int(self._rows("SELECT COUNT(*) FROM penstock_outbox")[0][0])

    def relayed(self) -> int:
        return int(
            self._rows("SELECT (SELECT COUNT(*) FROM sales) - (SELECT COUNT(*) FROM penstock_outbox)")[0][0]
        )

    def _rows(self, sql: str) -> list[Any]:
        with self.connected() as connection:
            return list(connection.execute(sql).fetchall())


def told(value: bytes) -> tuple[str, int]:
    """Key and count of a message."""
    document = json.loads(value)
    return document["key"], document["count"]
