"""Ledgers in real databases: positions and results change in one transaction, and a fenced owner changes nothing."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from tests.servers import PostgresServer

from penstock.client.databases import postgres as postgres_ledger
from penstock.client.ledgers import (
    Ledger,
    LedgerFenced,
    LedgerTransaction,
    Position,
    TopicPartition,
    open_ledger,
    schema,
)
from penstock.client.stores import StoreError, StoreUnavailable, TransactionSpoiled, open_store

GROUP = "billing"
PLACE: TopicPartition = ("orders", 0)
OTHER: TopicPartition = ("orders", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with closing(open_ledger(url)) as opened:
        with opened.transaction() as transaction:
            transaction.connection.execute("CREATE TABLE results (source bigint)")
        yield opened


def results(ledger: Ledger) -> list[int]:
    with ledger.transaction() as transaction:
        return [source for (source,) in transaction.connection.execute("SELECT source FROM results")]


def put(transaction: LedgerTransaction, offset: int | None) -> None:
    transaction.connection.execute(f"INSERT INTO results VALUES ({offset or 0})")


def handle(ledger: Ledger, place: TopicPartition, position: Position, to_offset: int) -> None:
    """As a subscription does: the result, then the position, in one transaction."""
    with ledger.transaction() as transaction:
        put(transaction, position.offset)
        transaction.advance(GROUP, place, position.offset, to_offset, position.epoch)


def test_a_place_begins_without_a_position(ledger: Ledger) -> None:
    assert ledger.positions(GROUP, [PLACE, OTHER]) == {PLACE: None, OTHER: None}
    assert ledger.take(GROUP, [PLACE, OTHER, PLACE], "one") == {
        PLACE: Position(None, 1),
        OTHER: Position(None, 1),
    }
    assert ledger.positions(GROUP, [PLACE, OTHER]) == {PLACE: None, OTHER: None}
    assert ledger.take(GROUP, [], "one") == {}


def test_result_and_position_are_kept_together(ledger: Ledger) -> None:
    first = ledger.take(GROUP, [PLACE], "one")[PLACE]
    handle(ledger, PLACE, first, 8)
    handle(ledger, PLACE, Position(8, first.epoch), 9)
    assert ledger.positions(GROUP, [PLACE, OTHER]) == {PLACE: 9, OTHER: None}
    assert ledger.positions("shipping", [PLACE]) == {PLACE: None}
    assert results(ledger) == [0, 8]
    assert ledger.take(GROUP, [PLACE], "two") == {PLACE: Position(9, 2)}


def test_result_and_position_are_given_up_together(ledger: Ledger) -> None:
    first = ledger.take(GROUP, [PLACE], "one")[PLACE]

    def fail() -> None:
        with ledger.transaction() as transaction:
            put(transaction, 0)
            transaction.advance(GROUP, PLACE, None, 8, first.epoch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (ledger.positions(GROUP, [PLACE]), results(ledger)) == ({PLACE: None}, [])
    handle(ledger, PLACE, first, 8)


def test_positions_outlive_the_ledger(url: str) -> None:
    with closing(open_ledger(url)) as first:
        position = first.take(GROUP, [PLACE], "one")[PLACE]
        with first.transaction() as transaction:
            transaction.advance(GROUP, PLACE, None, 2**40, position.epoch)
    with closing(open_ledger(url)) as second:
        assert second.positions(GROUP, [PLACE]) == {PLACE: 2**40}


def test_a_zombie_changes_nothing_its_own_writes_included(ledger: Ledger) -> None:
    zombie = ledger.take(GROUP, [PLACE], "one")[PLACE]
    ledger.take(GROUP, [PLACE], "two")
    with pytest.raises(
        LedgerFenced, match=r"orders\[0\] of billing was taken over by two \(epoch 2, ours was 1\)"
    ):
        handle(ledger, PLACE, zombie, 8)
    assert (ledger.positions(GROUP, [PLACE]), results(ledger)) == ({PLACE: None}, [])


def test_nor_when_its_code_passes_over_the_fence(ledger: Ledger) -> None:
    zombie = ledger.take(GROUP, [PLACE], "one")[PLACE]
    ledger.take(GROUP, [PLACE], "two")

    def insist() -> None:
        with ledger.transaction() as transaction:
            put(transaction, 0)
            with contextlib.suppress(LedgerFenced):
                transaction.advance(GROUP, PLACE, None, 8, zombie.epoch)
            put(transaction, 1)

    with pytest.raises(LedgerFenced):
        insist()
    assert (ledger.positions(GROUP, [PLACE]), results(ledger)) == ({PLACE: None}, [])


def test_a_zombie_is_fenced_in_the_middle_of_its_transaction(postgres_url: str) -> None:
    """With SQLite no member can take over while a transaction is open."""
    with closing(open_ledger(postgres_url)) as ledger:
        zombie = ledger.take(GROUP, [PLACE], "one")[PLACE]

        def lose_it_midway() -> None:
            with ledger.transaction() as transaction:
                transaction.connection.execute("CREATE TABLE results (source bigint)")
                successor = ledger.take(GROUP, [PLACE], "two")[PLACE]
                with ledger.transaction() as newer:
                    newer.advance(GROUP, PLACE, None, 8, successor.epoch)
                transaction.advance(GROUP, PLACE, None, 8, zombie.epoch)

        with pytest.raises(LedgerFenced):
            lose_it_midway()
        assert ledger.positions(GROUP, [PLACE]) == {PLACE: 8}


def test_the_next_owner_gets_the_offset_of_a_transaction_that_was_ending(ledger: Ledger) -> None:
    older = ledger.take(GROUP, [PLACE], "one")[PLACE]
    with ThreadPoolExecutor() as threads:
        with ledger.transaction() as transaction:
            transaction.advance(GROUP, PLACE, None, 8, older.epoch)
            taking = threads.submit(ledger.take, GROUP, [PLACE], "two")
        assert taking.result(60) == {PLACE: Position(8, 2)}


@pytest.mark.parametrize("from_offset", [None, 7, 9])
def test_a_position_that_is_another_than_thought_is_not_moved(
    ledger: Ledger, from_offset: int | None
) -> None:
    position = ledger.take(GROUP, [PLACE], "one")[PLACE]
    handle(ledger, PLACE, position, 8)
    with pytest.raises(LedgerFenced, match=f"is at 8, not at {from_offset}"):
        handle(ledger, PLACE, Position(from_offset, position.epoch), 10)
    assert (ledger.positions(GROUP, [PLACE]), results(ledger)) == ({PLACE: 8}, [0])


def test_a_position_without_an_owner_is_not_moved(ledger: Ledger) -> None:
    with pytest.raises(LedgerFenced, match="has no owner in the ledger"):
        handle(ledger, PLACE, Position(None, 1), 8)
    assert results(ledger) == []


def test_one_place_of_several_that_is_fenced_stops_all(ledger: Ledger) -> None:
    mine = ledger.take(GROUP, [PLACE, OTHER], "one")
    ledger.take(GROUP, [OTHER], "two")

    def advance_both() -> None:
        with ledger.transaction() as transaction:
            for place in (PLACE, OTHER):
                transaction.advance(GROUP, place, None, 8, mine[place].epoch)

    with pytest.raises(LedgerFenced):
        advance_both()
    assert ledger.positions(GROUP, [PLACE, OTHER]) == {PLACE: None, OTHER: None}


def test_of_two_that_make_the_same_step_one_makes_it(ledger: Ledger) -> None:
    position = ledger.take(GROUP, [PLACE], "one")[PLACE]

    def attempt(_: int) -> bool:
        with contextlib.suppress(LedgerFenced):
            handle(ledger, PLACE, position, 8)
            return True
        return False

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(attempt, range(4))) == 1
    assert results(ledger) == [0]


def test_owners_that_take_over_from_each_other_handle_everything_once(url: str, ledger: Ledger) -> None:
    """Each believes to be the owner until it is fenced, as members do around a rebalance."""
    total, meeting = 60, threading.Barrier(3)

    def member(seed: int) -> int:
        chance, fences = Random(seed), 0
        with closing(open_ledger(url)) as mine:
            position = mine.take(GROUP, [PLACE], f"member-{seed}")[PLACE]
            meeting.wait(20)  # all have taken it, so all but one are fenced
            while (start := position.offset or 0) != total:
                try:
                    for offset in range(start, min(total, start + chance.randint(2, 9))):
                        handle(mine, PLACE, Position(offset or None, position.epoch), offset + 1)
                except LedgerFenced:
                    fences += 1
                position = mine.take(GROUP, [PLACE], f"member-{seed}")[PLACE]
        return fences

    with ThreadPoolExecutor(3) as threads:
        fences = sum(threads.map(member, range(3)))
    assert sorted(results(ledger)) == list(range(total))
    assert fences >= 2


def test_an_owner_that_hangs_in_its_transaction_is_reported(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ledger, "_TAKE_TIMEOUT_MS", 50)
    with closing(open_ledger(postgres_url)) as ledger:
        older = ledger.take(GROUP, [PLACE], "one")[PLACE]
        with ledger.transaction() as transaction:
            transaction.advance(GROUP, PLACE, None, 8, older.epoch)
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                ledger.take(GROUP, [PLACE], "two")
        assert ledger.take(GROUP, [PLACE], "two") == {PLACE: Position(8, 2)}


def test_a_failed_statement_that_is_passed_over_moves_nothing(postgres_url: str) -> None:
    with closing(open_ledger(postgres_url)) as ledger:
        position = ledger.take(GROUP, [PLACE], "one")[PLACE]

        def pass_over() -> None:
            with ledger.transaction() as transaction:
                transaction.advance(GROUP, PLACE, None, 8, position.epoch)
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    transaction.connection.execute("SELECT * FROM nowhere")

        with pytest.raises(TransactionSpoiled):
            pass_over()
        assert ledger.positions(GROUP, [PLACE]) == {PLACE: None}


def test_the_connection_may_be_set_as_the_user_likes(ledger: Ledger) -> None:
    position = ledger.take(GROUP, [PLACE], "one")[PLACE]

    def read_as_dictionaries() -> None:
        with ledger.transaction() as transaction:
            connection: Any = transaction.connection
            is_sqlite = isinstance(connection, sqlite3.Connection)
            connection.row_factory = (lambda *row: {"row": row}) if is_sqlite else psycopg.rows.dict_row
            transaction.advance(GROUP, PLACE, None, 8, position.epoch)
            transaction.advance(GROUP, PLACE, 7, 8, position.epoch)

    with pytest.raises(LedgerFenced, match="is at 8, not at 7"):
        read_as_dictionaries()
    assert ledger.positions(GROUP, [PLACE]) == {PLACE: None}


def test_a_database_lost_in_a_transaction_and_back_again(restartable_postgres: PostgresServer) -> None:
    with closing(open_ledger(restartable_postgres.empty_database())) as ledger:
        position = ledger.take(GROUP, [PLACE], "one")[PLACE]

        def lose_it() -> None:
            with ledger.transaction() as transaction:
                transaction.advance(GROUP, PLACE, None, 8, position.epoch)
                restartable_postgres.kill()

        with pytest.raises(StoreUnavailable, match="unknown whether"):
            lose_it()
        with pytest.raises(StoreUnavailable):
            ledger.take(GROUP, [PLACE], "one")
        restartable_postgres.start()
        assert ledger.positions(GROUP, [PLACE]) == {PLACE: None}
        with ledger.transaction() as transaction:
            transaction.advance(GROUP, PLACE, None, 8, position.epoch)
        assert ledger.positions(GROUP, [PLACE]) == {PLACE: 8}


def test_sqlite_locked_by_another_process_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(open_ledger(f"sqlite:///{path}?timeout=0.05")) as ledger:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable):
                ledger.take(GROUP, [PLACE], "one")
        assert ledger.take(GROUP, [PLACE], "one") == {PLACE: Position(None, 1)}


def test_a_table_made_by_a_migration(url: str) -> None:
    mine = f"{url}?create=false"
    with pytest.raises(StoreError, match="create=false"):
        open_ledger(mine)
    with closing(open_store(url)) as store, store.transaction() as transaction:
        for statement in schema("sqlite" if url.startswith("sqlite") else "postgresql"):
            transaction.connection.execute(statement)
    with closing(open_ledger(mine)) as ledger:
        assert ledger.take(GROUP, [PLACE], "one") == {PLACE: Position(None, 1)}
