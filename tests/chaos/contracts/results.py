"""Where results, marks and positions of lanes are kept, and what is there in the end."""

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from confluent_kafka import Message
from tests.servers import PostgresServer, RedisServer

SQLITE, POSTGRESQL, REDIS = "sqlite", "postgresql", "redis"
DATABASES = (SQLITE, POSTGRESQL, REDIS)
CREATE = "CREATE TABLE IF NOT EXISTS results (number BIGINT NOT NULL)"


@contextlib.contextmanager
def databases(kind: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """For each name a URL; where rows can be kept, there is a table for them."""
    if kind == SQLITE:
        yield lambda name: _prepared(f"sqlite:///{folder / f'{name}.db'}")
    elif kind == POSTGRESQL:
        with PostgresServer() as server:
            yield lambda name: _prepared(server.new_database())
    else:
        with RedisServer() as server:
            yield lambda name: server.url()


def _prepared(url: str) -> str:
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(_path(url))) as connection, connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(CREATE)
    else:
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute(CREATE)
    return url


def rows_in(url: str) -> Counter[int]:
    question = "SELECT number FROM results"
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(_path(url))) as connection:
            return Counter(number for (number,) in connection.execute(question))
    import psycopg

    with psycopg.connect(url) as connection:
        return Counter(number for (number,) in connection.execute(question))


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def numbers_in(messages: list[Message]) -> Counter[int]:
    return Counter(int(message.value() or b"-1") for message in messages)
