"""Contracts that use a database, with real SQLite, PostgreSQL and Redis."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.application.apps import QUICK, committed, read_all, running

from penstock.client import ApplicationError, Backoff, Message, Penstock
from penstock.client.deadletters.headers import dead_letter_topic
from penstock.client.stores import StoreUnavailable, open_store
from penstock.protocol import dead_letter_headers


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/seen.db"
    url: str = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "redis_url")
    return url


def execute(url: str, statement: str) -> list[Any]:
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            return connection.execute(statement).fetchall()
    import psycopg

    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


TWO_ATTEMPTS = Backoff(base="50ms", cap="50ms", attempts=2)


def publish(app: Penstock, topic: str, numbers: range) -> None:
    for future in [app.publish_soon(topic, {"id": number}, key=f"k{number % 5}") for number in numbers]:
        future.result(30)


def test_result_and_position_share_a_transaction_of_the_database(
    app: Penstock, topic: str, group: str, bootstrap: str, database_url: str
) -> None:
    execute(database_url, "CREATE TABLE bills (id INTEGER)")
    publish(app, topic, range(60))

    @app.subscribe(topic, group=group, delivery="exactly-once", ledger=database_url, retry=TWO_ATTEMPTS)
    def bill(order: dict[str, int], message: Message, connection: Any) -> None:
        connection.execute(f"INSERT INTO bills VALUES ({order['id']})")
        if order["id"] == 17 or (order["id"] == 23 and message.attempt == 1):
            raise RuntimeError("after the write")

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.handled >= 59 and figures.dead == 1):
        pass
    billed = sorted(row[0] for row in execute(database_url, "SELECT id FROM bills"))
    assert billed == [number for number in range(60) if number != 17]
    assert len(read_all(bootstrap, dead_letter_topic(topic))) == 1
    # The group follows, so that lag shows.
    assert sum(committed(bootstrap, group, topic, 2).values()) == 60


def test_the_ledger_wins_over_the_position_of_the_group(
    topic: str, group: str, bootstrap: str, database_url: str
) -> None:
    execute(database_url, "CREATE TABLE bills (id INTEGER)")

    def run(until: int) -> None:
        app = Penstock(bootstrap, settings=QUICK)

        @app.subscribe(topic, group=group, delivery="exactly-once", ledger=database_url)
        def bill(order: dict[str, int], connection: Any) -> None:
            connection.execute(f"INSERT INTO bills VALUES ({order['id']})")

        with running(app, until=lambda: app.figures()[bill.__qualname__].handled >= until):
            pass

    with Penstock(bootstrap) as publisher:
        publish(publisher, topic, range(20))
        run(until=20)
        member = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
        member.commit(offsets=[TopicPartition(topic, number, 0) for number in (0, 1)], asynchronous=False)
        member.close()
        publish(publisher, topic, range(20, 30))
    run(until=10)
    assert sorted(row[0] for row in execute(database_url, "SELECT id FROM bills")) == list(range(30))


def test_messages_that_come_again_are_known_in_every_store(
    app: Penstock, topic: str, group: str, store_url: str
) -> None:
    for number in (1, 2, 3, 2, 1):
        app.publish(topic, {"id": number}, key="k", headers={dead_letter_headers.MESSAGE_ID: f"m{number}"})
    handled: list[int] = []

    @app.subscribe(topic, group=group, delivery="effectively-once", store=store_url)
    def bill(order: dict[str, int]) -> None:
        handled.append(order["id"])

    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.duplicates == 2):
        pass
    assert handled == [1, 2, 3]


def test_a_store_that_cannot_be_opened_ends_the_subscription_with_a_sentence(
    app: Penstock, topic: str, group: str
) -> None:
    @app.subscribe(topic, group=group, delivery="effectively-once", store="mongodb://somewhere/x")
    def bill(order: dict[str, int]) -> None: ...

    with pytest.raises(ApplicationError, match="mongodb"):
        app.run()


@pytest.mark.parametrize("contract", ["exactly-once", "effectively-once"])
def test_a_database_that_dies_and_comes_back_costs_and_doubles_nothing(
    app: Penstock, topic: str, group: str, bootstrap: str, restartable_postgres: Any, contract: str
) -> None:
    url = restartable_postgres.new_database()
    execute(url, "CREATE TABLE bills (id INTEGER)")
    publish(app, topic, range(200))
    keeper = {"ledger": url} if contract == "exactly-once" else {"store": url}
    killed: list[int] = []

    @app.subscribe(topic, group=group, delivery=contract, taken_max=20, **keeper)
    def bill(order: dict[str, int], connection: Any) -> None:
        connection.execute(f"INSERT INTO bills VALUES ({order['id']})")
        if app.figures()[bill.__qualname__].handled >= 40 and not killed:
            killed.append(order["id"])
            restartable_postgres.kill()
            restartable_postgres.start()

    def is_done() -> bool:
        if not killed or not app.figures()[bill.__qualname__].restarts:
            return False
        return len(execute(url, "SELECT id FROM bills")) >= 200

    with running(app, until=is_done, within_s=60):
        pass
    assert sorted(row[0] for row in execute(url, "SELECT id FROM bills")) == list(range(200))
    known = Consumer({"bootstrap.servers": bootstrap, "group.id": group}).list_topics(timeout=60).topics
    if dead_letter_topic(topic) in known:
        assert read_all(bootstrap, dead_letter_topic(topic)) == []


def test_a_handler_may_take_a_session_of_sqlalchemy(
    app: Penstock, topic: str, group: str, database_url: str
) -> None:
    from sqlalchemy import text

    execute(database_url, "CREATE TABLE bills (id INTEGER)")
    publish(app, topic, range(10))

    @app.subscribe(topic, group=group, delivery="exactly-once", ledger=database_url, retry=TWO_ATTEMPTS)
    def bill(order: dict[str, int], message: Message, session: Any) -> None:
        session.execute(text("INSERT INTO bills VALUES (:id)"), {"id": order["id"]})
        session.commit()
        if order["id"] == 3 and message.attempt == 1:
            raise RuntimeError("after what it took for a commit")

    with running(app, until=lambda: len(execute(database_url, "SELECT id FROM bills")) >= 10):
        pass
    assert sorted(row[0] for row in execute(database_url, "SELECT id FROM bills")) == list(range(10))


def test_a_table_that_may_not_be_written_ends_the_subscription(
    app: Penstock, topic: str, group: str, bootstrap: str, tmp_path: Path
) -> None:
    """The set-up is wrong, not the messages: none of them becomes a dead letter."""
    url = f"sqlite:///{tmp_path}/shop.db"
    publish(app, topic, range(3))

    @app.subscribe(topic, group=group, delivery="effectively-once", store=url)
    def bill(order: dict[str, int], connection: Any) -> None: ...

    open_store(url).close()
    execute(url, "DROP TABLE penstock_seen")
    execute(url, "CREATE TABLE penstock_seen (other INTEGER)")
    with pytest.raises(ApplicationError, match=r"shop\.db: no such column"):
        app.run()
    assert read_all(bootstrap, dead_letter_topic(topic)) == []


def test_an_outage_while_ids_are_looked_up_loses_nothing(
    app: Penstock, topic: str, group: str, tmp_path: Path
) -> None:
    """The batch was taken and has come to no handler when the member leaves, and must not be committed on the way."""
    store = open_store(f"sqlite:///{tmp_path}/seen.db")
    look_up, outages = store.seen, []

    def seen(scope: str, ids: Sequence[str]) -> set[str]:
        if len(handled) >= 40 and len(outages) < 2:
            outages.append(list(ids))
            raise StoreUnavailable("the database does not answer")
        return look_up(scope, ids)

    store.seen = seen  # type: ignore[method-assign]
    publish(app, topic, range(200))
    handled: list[int] = []

    @app.subscribe(topic, group=group, delivery="effectively-once", store=store, taken_max=20)
    def bill(order: dict[str, int]) -> None:
        handled.append(order["id"])

    with running(app, until=lambda: len(outages) == 2 and len(set(handled)) == 200):
        pass
    assert sorted(handled) == list(range(200))
    store.close()
