"""Messages become rows in the caller's transaction, with every supported database library."""

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import Session
from tests.waiting import eventually

from penstock.client.outbox import OutboxError, add, create_table, schema
from penstock.client.outbox.database import create_tables, open_database

Opened = AbstractContextManager[tuple[Any, Any]]


@contextmanager
def plain(url: str, *, with_cursor: bool) -> Iterator[tuple[Any, Any]]:
    is_sqlite = url.startswith("sqlite")
    connection: Any = sqlite3.connect(url.removeprefix("sqlite:///")) if is_sqlite else psycopg.connect(url)
    yield (connection.cursor() if with_cursor else connection), connection
    connection.close()


@contextmanager
def alchemy(url: str, *, with_session: bool) -> Iterator[tuple[Any, Any]]:
    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) if with_session else engine.connect() as opened:
        yield opened, opened
    engine.dispose()


WAYS: dict[str, Callable[[str], Opened]] = {
    "connection": lambda url: plain(url, with_cursor=False),
    "cursor": lambda url: plain(url, with_cursor=True),
    "session": lambda url: alchemy(url, with_session=True),
    "sqlalchemy connection": lambda url: alchemy(url, with_session=False),
}


def rows(url: str) -> list[Any]:
    database = open_database(url)
    try:
        return database.batch(0, 1, rows_max=100, bytes_max=1 << 20, holds_keys=True)
    finally:
        database.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_message_is_there_if_and_only_if_its_transaction_is(url: str, way: str) -> None:
    with WAYS[way](url) as (given, transaction):
        create_table(given)
        transaction.commit()
        add(given, "orders", {"n": 1}, key="k")
        transaction.rollback()
        message_id = add(given, "orders", {"n": 2}, key="k", headers={"a": "b"})
        transaction.commit()
        add(given, "orders", {"n": 3}, key="k")
    (row,) = rows(url)
    assert (row.topic, row.key, row.value, row.message_id) == ("orders", b"k", b'{"n":2}', message_id)
    assert '["a", "b"]' in row.headers
    assert "traceparent" in row.headers


def test_values_are_kept_as_they_are(url: str) -> None:
    create_tables(url)
    values = [b"\x00\xff", "text", None, {"a": [1]}]
    with plain(url, with_cursor=False) as (connection, _):
        for value in values:
            add(connection, "orders", value, key=b"\x00k", partition=3, message_id="mine")
        connection.commit()
    found = rows(url)
    assert [row.value for row in found] == [b"\x00\xff", b"text", None, b'{"a":[1]}']
    assert {(row.key, row.partition, row.message_id) for row in found} == {(b"\x00k", 3, "mine")}


def test_a_message_outside_of_any_transaction_is_refused(url: str) -> None:
    """It would be published even if the change that it tells of never comes to be."""
    create_tables(url)
    if url.startswith("sqlite"):
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    else:
        connection = psycopg.connect(url, autocommit=True)
    with pytest.raises(OutboxError, match="commits every statement"):
        add(connection, "orders", "v")
    connection.execute("BEGIN")
    add(connection, "orders", "v")
    connection.execute("COMMIT")
    connection.close()
    assert len(rows(url)) == 1


def test_an_engine_in_autocommit_mode_is_refused(postgres_url: str) -> None:
    create_tables(postgres_url)
    address = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(address, isolation_level="AUTOCOMMIT")
    with (
        engine.connect() as connection,
        pytest.raises(OutboxError, match="commits every statement"),
    ):
        add(connection, "orders", "v")
    engine.dispose()


def test_what_is_no_connection_is_refused() -> None:
    with pytest.raises(TypeError, match="pass a SQLAlchemy Session or Connection"):
        add(sqlalchemy.create_engine("sqlite://"), "orders", "v")
    with pytest.raises(TypeError, match="a key must be str or bytes, not int"):
        add(sqlite3.connect(":memory:"), "orders", "v", key=7)  # type: ignore[arg-type]
    with pytest.raises(OutboxError, match="PostgreSQL or SQLite, not mysql"):
        schema("mysql")


def test_an_asynchronous_session_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncSession:
        pass

    monkeypatch.setitem(sys.modules, "sqlalchemy.ext.asyncio", SimpleNamespace(AsyncSession=AsyncSession))
    with pytest.raises(TypeError, match=r"await session\.run_sync"):
        add(AsyncSession(), "orders", "v")


def test_messages_without_a_key_stay_together_with_their_transaction(postgres_url: str) -> None:
    create_tables(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        for _ in range(3):
            add(connection, "orders", "a")
            add(connection, "orders", "b")
            connection.commit()
        found = connection.execute("SELECT shard_hash FROM penstock_outbox ORDER BY id").fetchall()
    hashes = [number for (number,) in found]
    assert hashes[0::2] == hashes[1::2]
    assert len(set(hashes)) == 3


def test_relays_are_told_when_the_transaction_commits(postgres_url: str) -> None:
    create_tables(postgres_url)
    with (
        psycopg.connect(postgres_url, autocommit=True) as listener,
        psycopg.connect(postgres_url) as connection,
    ):
        listener.execute("LISTEN penstock_outbox")
        add(connection, "orders", "v")
        connection.rollback()
        add(connection, "orders", "v", notify=False)
        connection.commit()
        assert list(listener.notifies(timeout=0.05)) == []
        add(connection, "orders", "v")
        add(connection, "orders", "v")
        connection.commit()
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1


def test_serialised_transactions_of_a_key_get_their_ids_in_the_order_of_their_commits(
    postgres_url: str,
) -> None:
    create_tables(postgres_url)
    with psycopg.connect(postgres_url) as first, psycopg.connect(postgres_url) as second:
        add(first, "orders", "1", key="k", serialise=True)
        add(second, "orders", "other", key="another", serialise=True)  # another key does not wait
        waiting = threading.Thread(target=lambda: add(second, "orders", "2", key="k", serialise=True))
        waiting.start()
        blocked = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: first.execute(blocked).fetchall(), what="the second waits")
        first.commit()
        waiting.join(20)
        second.commit()
    assert [row.value for row in rows(postgres_url) if row.key == b"k"] == [b"1", b"2"]


def test_many_may_make_the_tables_at_once(postgres_url: str) -> None:
    failures: list[BaseException] = []

    def make() -> None:
        try:
            create_tables(postgres_url)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_batches_are_bounded_in_rows_and_bytes(url: str) -> None:
    create_tables(url)
    with plain(url, with_cursor=False) as (connection, _):
        for _ in range(10):
            add(connection, "orders", b"x" * 1000, key="k")
        connection.commit()
    database = open_database(url)

    def count(rows_max: int, bytes_max: int) -> int:
        return len(database.batch(0, 1, rows_max=rows_max, bytes_max=bytes_max, holds_keys=True))

    assert count(3, 1 << 20) == 3
    assert count(10, 2500) == 3, "the first that goes beyond the bound is the last"
    assert count(10, 1) == 1, "one there is always"
    database.close()


def test_ids_are_never_given_twice(url: str) -> None:
    """A marker would take the second row for the first."""
    create_tables(url)
    with plain(url, with_cursor=False) as (connection, _):
        for _ in range(2):
            add(connection, "orders", "v")
            connection.commit()
            (row,) = rows(url)
            connection.execute("DELETE FROM penstock_outbox")
            connection.commit()
    assert row.id == 2
