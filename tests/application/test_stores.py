"""Dedupe stores on real servers: what is marked is seen, each id is claimed once, and nothing is half done."""

import asyncio
import contextlib
import logging
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import PostgresServer, RedisServer
from tests.waiting import eventually

from penstock.client.stores import (
    DedupeStore,
    StoreError,
    StoreUnavailable,
    TransactionSpoiled,
    open_store,
    schema,
)

HOUR_S = 3600.0
BLINK_S = 0.001


@pytest.fixture(params=["sqlite", "redis", "postgresql"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


def _url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fixtures = {"redis": "redis_url", "postgresql": "postgres_url"}
    if request.param in fixtures:
        return str(request.getfixturevalue(fixtures[request.param]))
    return f"sqlite:///{tmp_path}/seen.db"


@pytest.fixture
def store(any_url: str) -> Iterator[DedupeStore]:
    with closing(open_store(any_url)) as opened:
        yield opened


@pytest.fixture
def sql_store(sql_url: str) -> Iterator[DedupeStore]:
    with closing(open_store(sql_url)) as opened:
        with opened.transaction() as transaction:
            transaction.connection.execute("CREATE TABLE results (what text UNIQUE)")
        yield opened


def results(store: DedupeStore) -> list[str]:
    with store.transaction() as transaction:
        return [what for (what,) in transaction.connection.execute("SELECT what FROM results ORDER BY what")]


def put(connection: Any, what: str) -> None:
    connection.execute(f"INSERT INTO results VALUES ('{what}')")


def handle(store: DedupeStore, work: Callable[[Any], object]) -> None:
    """As a subscription does: claim the message and do the work in one transaction."""
    with store.transaction() as transaction:
        assert transaction.claim("billing", "a", HOUR_S)
        work(transaction.connection)


def pay_and_fail(connection: Any) -> None:
    put(connection, "paid a")
    raise ZeroDivisionError


# Marks


def test_what_is_marked_is_seen_in_its_scope(store: DedupeStore) -> None:
    store.mark("billing", ["a", "b", "a"], HOUR_S)
    assert store.seen("billing", ["a", "b", "c", "a"]) == {"a", "b"}
    assert store.seen("shipping", ["a", "b", "c"]) == set()


def test_nothing_to_mark_and_nothing_to_look_for(store: DedupeStore) -> None:
    store.mark("billing", [], HOUR_S)
    assert store.seen("billing", []) == set()


def test_batches_of_any_size(store: DedupeStore) -> None:
    ids = [f"id-{number}" for number in range(2500)]
    store.mark("billing", ids, HOUR_S)
    assert store.seen("billing", [*ids, "other"]) == set(ids)


def test_an_id_may_be_any_text(store: DedupeStore) -> None:
    ids = [
        "",
        "ünï",
        "a'b\"c",
        "%s ? {x}",
        "nul\0",
        "x" * 5000,
        "x" * 5001,
        "y" * 1024,
        "two\nlines",
        "\ud800",
    ]
    for id in ids:
        assert store.seen("billing", [id]) == set()
        store.mark("billing", [id], HOUR_S)
    assert store.seen("billing", ids) == set(ids)
    assert store.claim("s" * 5000, "a", HOUR_S)
    assert not store.claim("s" * 5000, "a", HOUR_S)
    assert store.claim("s" * 5001, "a", HOUR_S)


def test_scopes_and_ids_do_not_run_into_each_other(store: DedupeStore) -> None:
    store.mark("a", ["b:c"], HOUR_S)
    assert store.seen("a:b", ["c"]) == set()
    assert store.seen("a%3Ab", ["c"]) == set()


def test_a_mark_is_forgotten_in_time_and_the_last_mark_counts(store: DedupeStore) -> None:
    store.mark("billing", ["a", "b"], BLINK_S)
    eventually(lambda: store.seen("billing", ["a", "b"]) == set())
    store.mark("billing", ["a"], HOUR_S)
    assert store.seen("billing", ["a", "b"]) == {"a"}
    store.mark("billing", ["a"], BLINK_S)
    eventually(lambda: store.seen("billing", ["a"]) == set())


def test_an_expired_mark_can_be_claimed_again(store: DedupeStore) -> None:
    assert store.claim("billing", "a", BLINK_S)
    eventually(lambda: store.claim("billing", "a", HOUR_S))
    assert not store.claim("billing", "a", HOUR_S)


def test_marks_outlive_the_store_that_made_them(any_url: str) -> None:
    with closing(open_store(any_url)) as first:
        first.mark("billing", ["a"], HOUR_S)
    with closing(open_store(any_url)) as second:
        assert second.seen("billing", ["a"]) == {"a"}


def test_old_marks_are_removed_and_no_others(sql_store: DedupeStore) -> None:
    old = [f"id-{number}" for number in range(2100)]
    sql_store.mark("billing", old, BLINK_S)
    sql_store.mark("billing", ["young"], HOUR_S)
    eventually(lambda: sql_store.seen("billing", old) == set())
    assert sql_store.expire() == len(old)
    assert sql_store.expire() == 0
    assert sql_store.seen("billing", ["young"]) == {"young"}
    with sql_store.transaction() as transaction:
        assert transaction.connection.execute("SELECT count(*) FROM penstock_seen").fetchone() == (1,)


def test_expiry_at_a_moment_that_is_told(sql_store: DedupeStore) -> None:
    sql_store.mark("billing", ["a"], HOUR_S)
    assert sql_store.expire(now=0.0) == 0
    assert sql_store.expire(now=4e9) == 1


def test_sqlite_goes_by_the_clock_it_is_given(tmp_path: Path) -> None:
    now = 1000.0
    with closing(open_store(f"sqlite:///{tmp_path}/seen.db", clock=lambda: now)) as store:
        store.mark("billing", ["a"], 60)
        now = 1059.9
        assert store.seen("billing", ["a"]) == {"a"}
        now = 1060.0
        assert store.seen("billing", ["a"]) == set()
        assert store.claim("billing", "a", 60)


# Transactions


def test_result_and_mark_are_kept_together(sql_store: DedupeStore) -> None:
    assert sql_store.shares_transactions
    with sql_store.transaction() as transaction:
        assert transaction.claim("billing", "a", HOUR_S)
        assert not transaction.claim("billing", "a", HOUR_S)
        put(transaction.connection, "paid a")
    with sql_store.transaction() as transaction:
        assert not transaction.claim("billing", "a", HOUR_S)
    assert results(sql_store) == ["paid a"]
    assert sql_store.seen("billing", ["a"]) == {"a"}


def test_result_and_mark_are_given_up_together(sql_store: DedupeStore) -> None:
    with pytest.raises(ZeroDivisionError):
        handle(sql_store, pay_and_fail)
    assert results(sql_store) == []
    assert sql_store.claim("billing", "a", HOUR_S)


def test_a_batch_is_claimed_but_for_what_was_seen(sql_store: DedupeStore) -> None:
    sql_store.mark("billing", ["b"], HOUR_S)
    with sql_store.transaction() as transaction:
        assert transaction.claim_all("billing", ["c", "b", "a", "c"], HOUR_S) == {"a", "c"}
        assert transaction.claim_all("billing", ["a", "d"], HOUR_S) == {"d"}
    assert sql_store.seen("billing", ["a", "b", "c", "d"]) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("is_kept", [True, False])
def test_who_claims_what_another_has_in_hand_learns_how_that_ended(
    sql_store: DedupeStore, is_kept: bool
) -> None:
    with ThreadPoolExecutor() as threads:
        others = []

        def work(connection: Any) -> None:
            others.append(threads.submit(sql_store.claim, "billing", "a", HOUR_S))
            if not is_kept:
                raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            handle(sql_store, work)
        assert others[0].result(20) is not is_kept


def test_the_connection_may_be_set_as_the_user_likes(sql_store: DedupeStore) -> None:
    with sql_store.transaction() as transaction:
        connection = transaction.connection
        if isinstance(connection, sqlite3.Connection):
            connection.row_factory = lambda cursor, row: {"row": row}
        else:
            connection.row_factory = psycopg.rows.dict_row
        assert transaction.claim("billing", "a", HOUR_S)
    assert sql_store.seen("billing", ["a"]) == {"a"}
    with sql_store.transaction() as transaction:
        assert transaction.connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_the_transaction_is_not_the_handlers_to_end(sql_store: DedupeStore, how: str) -> None:
    def work(connection: Any) -> None:
        put(connection, "paid a")
        getattr(connection, how)()

    with pytest.raises((TransactionSpoiled, psycopg.ProgrammingError)):
        handle(sql_store, work)
    assert results(sql_store) == []
    assert sql_store.claim("billing", "a", HOUR_S)


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_nor_in_sql(sql_store: DedupeStore, statement: str) -> None:
    with pytest.raises((TransactionSpoiled, sqlite3.DatabaseError)):
        handle(sql_store, lambda connection: connection.execute(statement))
    sql_store.mark("billing", ["b"], HOUR_S)  # and it goes on


@pytest.mark.parametrize(
    "work",
    [
        lambda connection: connection.cursor().executescript("SELECT 1"),
        lambda connection: connection.executescript("SELECT 1"),
        lambda connection: setattr(connection, "isolation_level", None),
    ],
)
def test_nor_in_the_other_ways_that_sqlite3_has(tmp_path: Path, work: Callable[[Any], object]) -> None:
    with closing(open_store(f"sqlite:///{tmp_path}/seen.db")) as store:
        with pytest.raises((TransactionSpoiled, sqlite3.DatabaseError)):
            handle(store, work)
        assert store.claim("billing", "a", HOUR_S)


def test_a_block_of_the_handlers_own_is_a_savepoint(sql_store: DedupeStore) -> None:
    def block(connection: Any) -> Any:
        return connection if isinstance(connection, sqlite3.Connection) else connection.transaction()

    def put_both(connection: Any, *both: str) -> None:
        with block(connection):
            for what in both:
                put(connection, what)

    def work(connection: Any) -> None:
        put_both(connection, "one")
        with pytest.raises((sqlite3.IntegrityError, psycopg.errors.UniqueViolation)):
            put_both(connection, "two", "one")
        put_both(connection, "three", "four")

    handle(sql_store, work)
    assert results(sql_store) == ["four", "one", "three"]
    assert sql_store.seen("billing", ["a"]) == {"a"}


def pass_over_a_failure(connection: Any) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM nowhere")


def roll_back_in_silence(connection: Any) -> None:
    raise psycopg.Rollback


def close(connection: Any) -> None:
    connection.close()


@pytest.mark.parametrize("work", [pass_over_a_failure, roll_back_in_silence, close])
def test_what_postgresql_would_not_keep_is_not_taken_for_success(
    postgres_url: str, work: Callable[[Any], None]
) -> None:
    """It makes a rollback of a commit that follows on a failure, and reports no error."""
    with closing(open_store(postgres_url)) as store:
        with pytest.raises(TransactionSpoiled):
            handle(store, work)
        assert store.claim("billing", "a", HOUR_S)


def conflict(connection: Any) -> None:
    put(connection, "x")
    with pytest.raises(sqlite3.IntegrityError):
        put(connection, "x")


@pytest.mark.parametrize("work", [conflict, close])
def test_what_sqlite_would_not_keep_is_not_taken_for_success(
    tmp_path: Path, work: Callable[[Any], None]
) -> None:
    with closing(open_store(f"sqlite:///{tmp_path}/seen.db")) as store:
        with store.transaction() as transaction:
            transaction.connection.execute("CREATE TABLE results (what text UNIQUE ON CONFLICT ROLLBACK)")
        with pytest.raises(TransactionSpoiled):
            handle(store, work)
        assert results(store) == []
        assert store.claim("billing", "a", HOUR_S)


def test_a_constraint_that_is_looked_at_last_is_the_handlers_failure(postgres_url: str) -> None:
    with closing(open_store(postgres_url)) as store:
        with store.transaction() as transaction:
            transaction.connection.execute(
                "CREATE TABLE results (x int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
            )
        with pytest.raises(psycopg.errors.UniqueViolation):
            handle(store, lambda connection: connection.execute("INSERT INTO results VALUES (1), (1)"))
        assert store.claim("billing", "a", HOUR_S)


def test_redis_says_that_it_shares_no_transactions(redis_url: str) -> None:
    with closing(open_store(redis_url)) as store:
        assert not store.shares_transactions
        assert store.expire() == 0
        with pytest.raises(StoreError, match="SQLite or PostgreSQL"):
            store.transaction()


# Many at once

CLAIMER = """
import sys
from penstock.client.stores import open_store
store = open_store(sys.argv[1])
for number in range(int(sys.argv[2])):
    if store.claim("billing", f"id-{number}", 3600.0):
        print(number)
store.close()
"""


def test_of_several_processes_one_gets_each_claim(any_url: str) -> None:
    count, command = 60, [sys.executable, "-c", CLAIMER, any_url]
    processes = [
        subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(int(number) for output in outputs for number in output) == list(range(count))


def test_of_several_threads_one_gets_each_claim(store: DedupeStore) -> None:
    ids = [f"id-{number}" for number in range(40)]
    with ThreadPoolExecutor(6) as threads:
        claims = list(threads.map(lambda id: store.claim("billing", id, HOUR_S), ids * 6))
    assert sum(claims) == len(ids)


def test_batches_that_overlap_are_claimed_and_marked_without_a_deadlock(sql_store: DedupeStore) -> None:
    ids = [f"id-{number}" for number in range(30)]

    def claim(seed: int) -> int:
        mine = ids if seed % 2 else ids[::-1]
        sql_store.mark("other", mine, HOUR_S)
        with sql_store.transaction() as transaction:
            return len(transaction.claim_all("billing", mine, HOUR_S))

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(claim, range(24))) == len(ids)


def test_many_may_create_the_table_at_once(sql_url: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(open_store, [sql_url] * 8))
    for store in stores:
        store.close()


DYING = """
import os, signal, sys
from penstock.client.stores import open_store
store = open_store(sys.argv[1])
with store.transaction() as transaction:
    assert transaction.claim("billing", "kept", 3600.0)
    transaction.connection.execute("INSERT INTO results VALUES ('kept')")
with store.transaction() as transaction:
    assert transaction.claim("billing", "half", 3600.0)
    transaction.connection.execute("INSERT INTO results VALUES ('half')")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing_half_done(sql_store: DedupeStore, sql_url: str) -> None:
    killed = subprocess.run([sys.executable, "-c", DYING, sql_url], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert sql_store.claim("billing", "half", HOUR_S)
    assert not sql_store.claim("billing", "kept", HOUR_S)
    assert results(sql_store) == ["kept"]


def test_on_an_event_loop_sqlite_does_not_wait_for_its_own_task(tmp_path: Path) -> None:
    async def second_while_first_is_open(store: DedupeStore) -> None:
        with store.transaction() as transaction:
            transaction.claim("billing", "a", HOUR_S)
            with pytest.raises(StoreUnavailable, match="one writer at a time"):
                store.claim("billing", "b", HOUR_S)
        assert store.claim("billing", "b", HOUR_S)

    with closing(open_store(f"sqlite:///{tmp_path}/seen.db")) as store:
        asyncio.run(second_while_first_is_open(store))


# Outages


def test_postgresql_goes_away_and_comes_back(restartable_postgres: PostgresServer) -> None:
    url = restartable_postgres.new_database()
    with closing(open_store(url)) as store:
        store.mark("billing", ["a"], HOUR_S)
        restartable_postgres.kill()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.seen("billing", ["a"])
            with pytest.raises(StoreUnavailable):
                store.mark("billing", ["b"], HOUR_S)
            with pytest.raises(StoreUnavailable):
                store.claim("billing", "b", HOUR_S)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            open_store(url)
        restartable_postgres.start()
        assert store.seen("billing", ["a", "b"]) == {"a"}


def test_connections_that_lay_idle_through_a_restart_are_replaced(
    restartable_postgres: PostgresServer,
) -> None:
    with closing(open_store(restartable_postgres.new_database())) as store:
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

    with closing(open_store(restartable_postgres.new_database())) as store:
        with pytest.raises(StoreUnavailable):
            handle(store, work)
        restartable_postgres.start()
        assert store.claim("billing", "a", HOUR_S)


def test_a_database_lost_before_the_commit(restartable_postgres: PostgresServer) -> None:
    with closing(open_store(restartable_postgres.new_database())) as store:
        with pytest.raises(StoreUnavailable, match="not known"):
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
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                store.seen("billing", ["a"])
            with pytest.raises(StoreUnavailable):
                store.mark("billing", ["b"], HOUR_S)
            with pytest.raises(StoreUnavailable):
                store.claim("billing", "b", HOUR_S)
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
    with pytest.raises(StoreError, match="does not let us in"):
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
        with pytest.raises(StoreError, match="no table penstock_seen"):
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
