"""Stores whose servers are down, refuse, or have other settings: clear errors, no partial changes, recovery."""

import contextlib
import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.application.store_helpers import HOUR_S, handle
from tests.servers import PostgresServer, RedisServer

from penstock.client.stores import StoreError, StoreUnavailable, open_store, schema


def check_unavailable(store: Any) -> None:
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.seen("billing", ["a"])
        with pytest.raises(StoreUnavailable):
            store.mark("billing", ["b"], HOUR_S)
        with pytest.raises(StoreUnavailable):
            store.claim("billing", "b", HOUR_S)


def test_postgresql_goes_away_and_comes_back(restartable_postgres: PostgresServer) -> None:
    url = restartable_postgres.empty_database()
    with closing(open_store(url)) as store:
        store.mark("billing", ["a"], HOUR_S)
        restartable_postgres.kill()
        check_unavailable(store)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            open_store(url)
        restartable_postgres.start()
        assert store.seen("billing", ["a", "b"]) == {"a"}


def test_connections_that_lay_idle_through_a_restart_are_replaced(
    restartable_postgres: PostgresServer,
) -> None:
    with closing(open_store(restartable_postgres.empty_database())) as store:
        with store.transaction(), store.transaction():
            pass  # two connections
        restartable_postgres.stop()
        restartable_postgres.start()
        assert store.claim("billing", "a", HOUR_S)
        restartable_postgres.kill()
        restartable_postgres.start()
        assert store.seen("billing", ["a"]) == {"a"}


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_a_database_lost_within_a_transaction_is_not_the_handlers_failure(
    restartable_postgres: PostgresServer, is_passed_over: bool
) -> None:
    def work(connection: Any) -> None:
        restartable_postgres.kill()
        with contextlib.suppress(psycopg.Error) if is_passed_over else contextlib.nullcontext():
            connection.execute("SELECT 1")

    with closing(open_store(restartable_postgres.empty_database())) as store:
        with pytest.raises(StoreUnavailable):
            handle(store, work)
        restartable_postgres.start()
        assert store.claim("billing", "a", HOUR_S)


def test_a_database_lost_before_the_commit(restartable_postgres: PostgresServer) -> None:
    with closing(open_store(restartable_postgres.empty_database())) as store:
        with pytest.raises(StoreUnavailable, match="unknown whether"):
            handle(store, lambda connection: restartable_postgres.kill())
        restartable_postgres.start()
        assert store.claim("billing", "a", HOUR_S)


@pytest.mark.parametrize("is_ours", [True, False])
def test_transactions_that_lock_each_other_may_be_tried_again(postgres_url: str, is_ours: bool) -> None:
    meeting = threading.Barrier(2)

    def lock(transaction: Any, number: int) -> None:
        if is_ours:
            transaction.claim("billing", f"id-{number}", HOUR_S)
        else:
            transaction.connection.execute("SELECT pg_advisory_xact_lock(%s)", [number])

    def lock_both(first: int, second: int) -> str:
        try:
            with store.transaction() as transaction:
                lock(transaction, first)
                meeting.wait(20)
                lock(transaction, second)
        except StoreUnavailable:
            return "again"
        return "done"

    quick = f"{postgres_url}?options=-c%20deadlock_timeout%3D20ms"
    with closing(open_store(quick)) as store, ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(lock_both, *pair) for pair in ((1, 2), (2, 1))]
        assert sorted(end.result(30) for end in ends) == ["again", "done"]


def test_redis_goes_away_and_comes_back(fresh_redis: RedisServer) -> None:
    with closing(open_store(fresh_redis.url())) as store:
        store.mark("billing", ["a"], HOUR_S)
        fresh_redis.kill()
        check_unavailable(store)
        with pytest.raises(StoreUnavailable):
            open_store(fresh_redis.url())
        fresh_redis.start()
        assert store.seen("billing", ["a", "b"]) == {"a"}
        fresh_redis.stop()
        fresh_redis.start()
        assert store.claim("billing", "b", HOUR_S)


def test_a_claim_in_redis_whose_answer_got_lost_is_still_ours(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(redis_url)) as store:
        client = store._client  # type: ignore[attr-defined]
        send = client.set
        monkeypatch.setattr(client, "set", lambda *what, **how: (send(*what, **how), send(*what, **how))[1])
        assert store.claim("billing", "a", HOUR_S)
        assert not store.claim("billing", "a", HOUR_S)


def test_redis_without_room_is_unavailable_and_never_silent(fresh_redis: RedisServer) -> None:
    with closing(open_store(fresh_redis.url())) as store:
        fresh_redis.call("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            store.mark("billing", ["a"], HOUR_S)
        with pytest.raises(StoreUnavailable):
            store.claim("billing", "a", HOUR_S)
        fresh_redis.call("CONFIG", "SET", "maxmemory", "0")
        store.mark("billing", ["a"], HOUR_S)


def test_redis_that_became_a_replica_is_unavailable(fresh_redis: RedisServer) -> None:
    with closing(open_store(fresh_redis.url())) as store:
        fresh_redis.call("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable):
            store.mark("billing", ["a"], HOUR_S)
        with pytest.raises(StoreUnavailable):
            store.claim("billing", "a", HOUR_S)
        fresh_redis.call("REPLICAOF", "NO", "ONE")
        store.mark("billing", ["a"], HOUR_S)


def test_redis_that_may_evict_marks_is_warned_of_once(
    fresh_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.client.stores"):
        open_store(fresh_redis.url()).close()
        assert caplog.messages == []
        fresh_redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with closing(open_store(fresh_redis.url())) as store:
            store.mark("billing", ["a"], HOUR_S)
            store.seen("billing", ["a"])
    assert len(caplog.messages) == 1
    assert "allkeys-lru" in caplog.messages[0]


def test_redis_that_wants_a_password(fresh_redis: RedisServer) -> None:
    fresh_redis.call("CONFIG", "SET", "requirepass", "secret")
    with pytest.raises(StoreError, match="refuses the login"):
        open_store(fresh_redis.url())
    with closing(open_store(fresh_redis.url().replace("//", "//:secret@"))) as store:
        assert store.claim("billing", "a", HOUR_S)


def test_a_redis_cluster_is_refused() -> None:
    with RedisServer(cluster_enabled="yes") as server, pytest.raises(StoreError, match="single server"):
        open_store(server.url())


def test_options_that_redis_does_not_know(redis_url: str) -> None:
    with pytest.raises(StoreError, match="colour"):
        open_store(f"{redis_url}?colour=green")


def test_sqlite_locked_by_another_process_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "seen.db"
    with closing(open_store(f"sqlite:///{path}?timeout=0.05")) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="locked by another writer"):
                store.mark("billing", ["a"], HOUR_S)
            with pytest.raises(StoreUnavailable):
                store.claim("billing", "a", HOUR_S)
            assert store.seen("billing", ["a"]) == set()  # readers do not wait
        assert store.claim("billing", "a", HOUR_S)


def test_a_transaction_of_sqlite_writes_alone_from_its_first_moment(tmp_path: Path) -> None:
    """Otherwise it could not write any more once it has read and another has written."""
    url = f"sqlite:///{tmp_path}/seen.db?timeout=0.05"
    with closing(open_store(url)) as store, closing(open_store(url)) as other:
        with store.transaction() as transaction:
            transaction.connection.execute("SELECT count(*) FROM penstock_seen").fetchall()
            with pytest.raises(StoreUnavailable):
                other.mark("billing", ["b"], HOUR_S)
            assert transaction.claim("billing", "a", HOUR_S)
        assert other.seen("billing", ["a"]) == {"a"}


def test_a_file_that_another_creates_at_the_same_time_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seen.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE results (what)")
        monkeypatch.setattr("time.sleep", lambda s: other.in_transaction and other.commit())
        with closing(open_store(f"sqlite:///{path}?timeout=5")) as store:
            assert store.claim("billing", "a", HOUR_S)


def test_a_full_disk_is_not_the_handlers_failure(tmp_path: Path) -> None:
    with closing(open_store(f"sqlite:///{tmp_path}/seen.db")) as store:
        with store.transaction() as transaction:
            transaction.connection.execute("CREATE TABLE results (what)")
            transaction.connection.execute("PRAGMA max_page_count=20")
        with pytest.raises(StoreUnavailable, match="full"):
            handle(
                store, lambda connection: connection.execute("INSERT INTO results VALUES (zeroblob(1000000))")
            )
        assert store.claim("billing", "a", HOUR_S)


def test_a_closed_store_says_so(sql_url: str) -> None:
    store = open_store(sql_url)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.seen("billing", ["a"])


# Tables and addresses


def test_without_the_right_to_create_tables(postgres_url: str) -> None:
    limited = postgres_url.replace("postgres@", "clerk@")
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("DO $$ BEGIN CREATE ROLE clerk LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
        owner.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        with pytest.raises(StoreError, match=r"stores\.schema\('postgresql'\)"):
            open_store(limited)
        with pytest.raises(StoreError, match="create=false"):
            open_store(f"{limited}?create=false")
        for statement in schema("postgresql"):
            owner.execute(statement)
        with closing(open_store(limited)) as store, pytest.raises(StoreError, match="permission denied"):
            store.seen("billing", ["a"])
        owner.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON penstock_seen TO clerk")
    for url in (limited, f"{limited}?create=false"):
        with closing(open_store(url)) as store:
            store.mark("billing", ["a"], HOUR_S)
            assert store.seen("billing", ["a"]) == {"a"}


def test_a_table_made_by_a_migration_of_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/seen.db?create=false"
    with closing(sqlite3.connect(tmp_path / "seen.db")) as owner:
        owner.execute("CREATE TABLE other (x)")
        with pytest.raises(StoreError, match="table penstock_seen is missing"):
            open_store(url)
        for statement in schema("sqlite"):
            owner.execute(statement)
    with closing(open_store(url)) as store:
        assert store.claim("billing", "a", HOUR_S)


def test_a_database_whose_text_is_not_unicode(postgres_server: PostgresServer) -> None:
    postgres_server.run("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreError, match="UTF8"):
        open_store(postgres_server.url("latin"))


def test_unix_sockets(postgres_server: PostgresServer, redis_server: RedisServer) -> None:
    for url in (postgres_server.socket_url(), f"unix://{redis_server.socket_path}"):
        with closing(open_store(url)) as store:
            store.mark("sockets", ["a"], HOUR_S)
            assert store.seen("sockets", ["a", "b"]) == {"a"}
