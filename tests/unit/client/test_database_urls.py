"""URLs of stores and ledgers: what is accepted, which errors others get, and that passwords are never shown."""

from pathlib import Path

import pytest

from penstock.client import stores
from penstock.client.databases.base import (
    INDEX_KEY_BYTES_MAX,
    DatabaseKind,
    index_key,
    index_keys,
    parse_database_url,
)
from penstock.client.ledgers import open_ledger
from penstock.client.ledgers import schema as ledger_schema
from penstock.client.stores import StoreError, open_store, schema


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///seen.db", "seen.db"),
        ("sqlite:///data/seen.db", "data/seen.db"),
        ("sqlite:////var/lib/seen.db", "/var/lib/seen.db"),
        ("sqlite:////with%20space%3F.db", "/with space?.db"),
    ],
)
def test_a_path_begins_after_three_slashes(url: str, path: str) -> None:
    assert parse_database_url(url).address == path
    assert parse_database_url(url).kind is DatabaseKind.SQLITE


def test_options_of_sqlite() -> None:
    found = parse_database_url("sqlite:///seen.db?create=false&timeout=2.5")
    assert (found.may_create, found.busy_timeout_s) == (False, 2.5)


@pytest.mark.parametrize(
    ("url", "for_libpq"),
    [
        ("postgresql://u:p@h:5432/db", "postgresql://u:p@h:5432/db"),
        ("postgres://h/db?create=no", "postgres://h/db"),
        ("postgresql:///db?host=/run/pg&create=false&port=1", "postgresql:///db?host=/run/pg&port=1"),
        ("postgresql://h/db?options=-c%20a%3Db+c&create=true", "postgresql://h/db?options=-c%20a%3Db+c"),
    ],
)
def test_libpq_gets_what_is_not_ours_as_it_is(url: str, for_libpq: str) -> None:
    found = parse_database_url(url)
    assert found.address == for_libpq
    assert found.may_create is ("create=no" not in url and "create=false" not in url)


@pytest.mark.parametrize(
    "url", ["redis://h:6379/0", "rediss://u:p@h/1?socket_timeout=2", "unix:///run/redis.sock?db=2"]
)
def test_redis_by_host_tls_and_socket(url: str) -> None:
    assert (parse_database_url(url).kind, parse_database_url(url).address) == (DatabaseKind.REDIS, url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://:memory:", "is lost when"),
        ("sqlite:///:memory:", "is lost when"),
        ("sqlite://", "is lost when"),
        ("sqlite://seen.db", "sqlite:///seen.db"),
        ("sqlite:///seen.db?mode=memory", "unknown option mode"),
        ("sqlite:///seen.db?create=perhaps", "create is true or false"),
        ("sqlite:///seen.db?timeout=long", "number of seconds"),
        ("sqlite:///seen#1.db", "%23"),
        ("postgresql+psycopg://h/db", "remove [+]psycopg"),
        ("postgresql://h/db?create=perhaps", "create is true or false"),
        ("mysql://h/db", "not a store URL"),
        ("seen.db", "not a store URL"),
        ("", "not a store URL"),
        ("redis://[::1", "not a valid store URL"),
    ],
)
def test_a_refusal_says_what_to_write(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        parse_database_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h:5432/db",
        "postgresql://u:secret@h/db?password=secret",
        "postgresql://u:sec/secret@h/db",
        "postgresql://u:secret?x@h/db",
        "postgresql+asyncpg://u:secret@h/db",
        "postgresql://u:secret@h/db?create=perhaps",
        "redis://:secret@h:6379/0",
        "redis://u:secret#x@h:6379/0",
        "mysql://u:secret@h/db",
    ],
)
def test_passwords_are_not_shown(url: str) -> None:
    try:
        told = parse_database_url(url).shown
    except StoreError as error:
        told = str(error)
    assert "secret" not in told


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis://h", "pip install 'penstock[redis]'"),
        ("postgresql://h/db", "pip install 'penstock[postgres]'"),
    ],
)
def test_a_missing_driver_is_named(url: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert remedy in str(caught.value)


def test_a_ledger_is_not_kept_in_redis() -> None:
    with pytest.raises(StoreError, match="SQLite or PostgreSQL"):
        open_ledger("redis://h")


def test_what_libpq_does_not_understand_is_told_without_the_password() -> None:
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://u:secret@h/db?colour=green")
    assert "colour" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database" * 100)
    for url, words in [
        (f"sqlite:///{tmp_path}/nowhere/seen.db", "nowhere does not exist"),
        (f"sqlite:///{tmp_path}/seen.db?create=false", "no such file"),
        (f"sqlite:///{tmp_path}/text", "not a database"),
        (f"sqlite:///{tmp_path}", "unable to open"),
    ]:
        with pytest.raises(StoreError, match=words):
            open_store(url)
    assert not (tmp_path / "seen.db").exists()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_sql_for_migrations(dialect: str) -> None:
    assert "penstock_seen" in schema(dialect)[0]
    assert "penstock_positions" in ledger_schema(dialect)[0]


def test_there_is_no_sql_for_redis() -> None:
    with pytest.raises(StoreError, match="sqlite, postgresql"):
        schema("redis")


def test_long_and_odd_ids_are_hashed_and_never_meet() -> None:
    kept = ["", "orders:3:17", "ü" * 512, "x" * INDEX_KEY_BYTES_MAX]
    hashed = [
        "ü" * 513,
        "x" * (INDEX_KEY_BYTES_MAX + 1),
        "a\0b",
        "a\0c",
        "lone \ud800",
        index_key("x" * 2000),
    ]
    assert [index_key(id) for id in kept] == kept
    assert all(index_key(id).startswith("sha256:") and index_key(id) != id for id in hashed)
    assert len(index_keys(kept + hashed + kept)) == len(kept + hashed)
