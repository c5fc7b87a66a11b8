"""Locks of relays: they end with their holder, and a lost lock is noticed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from penstock.client.outbox.database import OutboxDatabase, create_tables, open_database
from penstock.client.outbox.messages import RelayInterrupted

Sessions = Callable[[], OutboxDatabase]


@pytest.fixture
def session(url: str) -> Iterator[Sessions]:
    create_tables(url)
    opened: list[OutboxDatabase] = []

    def open_one() -> OutboxDatabase:
        opened.append(open_database(url))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def test_a_shard_has_one_holder_until_its_session_ends(session: Sessions) -> None:
    first, second = session(), session()
    assert first.hold_shard(0)
    assert not second.hold_shard(0)
    assert second.hold_shard(1)
    assert (second.is_shard_held(0), second.is_shard_held(2)) == (True, False)
    first.check_held()
    first.close()
    eventually(lambda: second.hold_shard(0), what="the end of a session")


def test_the_table_is_held_together_or_alone(session: Sessions) -> None:
    first, second = session(), session()
    assert first.hold_table(alone=False)
    assert second.hold_table(alone=False)
    second.release_table()
    assert not second.hold_table(alone=True)
    first.release_table()
    assert second.hold_table(alone=True)
    assert not first.hold_table(alone=False)
    second.release_table()
    assert first.hold_table(alone=False)


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_session_that_is_swapped_is_noticed(session: Sessions) -> None:
    """As a pooler does between transactions."""
    database = session()
    assert database.hold_shard(0)
    database.check_held()
    database.query("SELECT pg_advisory_unlock_all()")
    with pytest.raises(RelayInterrupted, match="a relay needs its own session"):
        database.check_held()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_relays_of_another_table_are_let_alone(session: Sessions, new_schema: Callable[[], str]) -> None:
    other = new_schema()
    create_tables(other)
    database, stranger = session(), open_database(other)
    assert database.hold_shard(0)
    assert stranger.hold_shard(0)
    stranger.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_lock_whose_file_is_gone_is_none(session: Sessions, tmp_path: Path) -> None:
    first, second = session(), session()
    assert first.hold_shard(0)
    (tmp_path / "shop.db-outbox-0.lock").unlink()
    with pytest.raises(RelayInterrupted, match="was removed"):
        first.check_held()
    assert second.hold_shard(0)
    assert not first.hold_shard(0), "it holds a file that no one else sees"
    assert not first.hold_shard(0)
