"""Dedupe stores on real servers: marks are found, each id is claimed once, and changes are atomic."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.application.store_helpers import BLINK_S, HOUR_S, handle, put, results
from tests.waiting import eventually

from penstock.client.stores import (
    DedupeStore,
    StoreError,
    StoreUnavailable,
    TransactionSpoiled,
    open_store,
)


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


def test_postgresql_looks_ids_up_without_reading_the_table(postgres_url: str) -> None:
    count, at_once = 20_000, 500
    with closing(open_store(postgres_url)) as store:
        for start in range(0, count, at_once):
            ids = [f"id-{number}" for number in range(start, start + at_once)]
            assert store.seen("billing", ids) == set()
            store.mark("billing", ids, HOUR_S)

    def rows_read() -> tuple[int, int]:
        question = """\
            SELECT seq_tup_read + idx_tup_fetch, n_tup_ins FROM pg_stat_user_tables WHERE relname = 'penstock_seen'"""
        with psycopg.connect(postgres_url) as connection:
            found = connection.execute(question).fetchone()
        assert found is not None
        return found

    eventually(lambda: rows_read()[1] >= count, what="the server's figures")
    assert rows_read()[0] < count


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
        assert others[0].result(60) is not is_kept


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
