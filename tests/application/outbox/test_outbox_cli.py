"""`penstock outbox` on the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.application.outbox.shop import Shop
from tests.brokers import environment, executable
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.cli.commands import run
from penstock.client.outbox import add
from penstock.client.outbox.database import create_tables

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outbox(capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, stdout and stderr of a command."""

    def call(*words: str) -> tuple[int, str, str]:
        code = run(["outbox", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def put(url: str, topic: str, value: object, **more: Any) -> None:
    with Shop(url).connected() as connection:
        add(connection, topic, value, **more)


def test_the_tables_are_made_or_shown(outbox: Command, sqlite_url: str, tmp_path: Path) -> None:
    code, printed, _ = outbox("init", "-d", sqlite_url, "--print")
    assert code == 0
    assert "CREATE TABLE IF NOT EXISTS penstock_outbox (" in printed
    assert not (tmp_path / "shop.db").exists(), "nothing was changed"
    assert outbox("init", "-d", "postgresql://x/y", "--print")[1].count("CREATE TABLE") == 3, (
        "no server is asked"
    )
    assert outbox("init", "-d", sqlite_url)[0] == 0
    assert outbox("init", "-d", sqlite_url)[0] == 0
    assert Shop(sqlite_url).waiting() == 0


def test_rows_are_relayed_and_counted(
    outbox: Command, url: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    create_tables(url)
    name, topic = unique("outbox")[:90], unique("orders")
    for number in range(3):
        put(url, topic, str(number), key=str(number))
    _, printed, _ = outbox("status", "-d", url, "--json")
    document = json.loads(printed)
    assert document["name"] is None
    assert [(each["waiting"], each["relayed"]) for each in document["shards"]] == [(3, False)]
    assert document["shards"][0]["oldest_s"] >= 0
    command = ("relay", "-d", url, "-b", bootstrap, "--name", name, "--shards", "2", "--once")
    code, _, told = outbox(*command)
    assert (code, told.splitlines()[-1]) == (0, "3 rows relayed")
    code, printed, _ = outbox("status", "-d", url)
    assert printed.split()[:4] == ["name", name, "shards", "2"]


def test_rejected_rows_are_shown_put_back_and_given_up(
    outbox: Command, sqlite_url: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    create_tables(sqlite_url)
    topic = unique("orders")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    create_topics(admin, NewTopic(topic, 1))
    for key in ("a", "b"):
        put(sqlite_url, topic, "there is no such partition", key=key, partition=7)
    relay = ("relay", "-d", sqlite_url, "-b", bootstrap, "--name", unique("outbox")[:90], "--once")
    code, _, told = outbox(*relay)
    assert (code, told.splitlines()[-1]) == (0, "0 rows relayed, 2 rows rejected")
    document = json.loads(outbox("rejected", "-d", sqlite_url, "--json")[1])
    assert [(row["id"], row["key"], row["reason"]) for row in document] == [
        (1, "a", f"{topic} has no partition 7"),
        (2, "b", f"{topic} has no partition 7"),
    ]
    assert "no partition 7" in outbox("rejected", "-d", sqlite_url)[1]
    assert outbox("retry", "-d", sqlite_url)[0] == 2
    assert "row 9 is not rejected" in outbox("retry", "-d", sqlite_url, "1", "9")[2]
    assert outbox("retry", "-d", sqlite_url, "1")[2] == "1 row put back\n"
    assert outbox("discard", "-d", sqlite_url, "--all", "--yes")[2] == "1 row discarded\n"
    assert outbox("rejected", "-d", sqlite_url)[2] == "no rejected rows\n"
    assert Shop(sqlite_url).waiting() == 1
    code, _, told = outbox(*relay, "--on-reject", "stop")
    assert (code, "refused row 1" in told) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("status", "-d", "sqlite:///{folder}/none.db"), 1, "database {folder}/none.db does not exist"),
        (("status", "-d", "sqlite:///{folder}/empty.db"), 1, "no such table"),
        (("status", "-d", "sqlite:///{folder}/text.db"), 1, "file is not a database"),
        (("status", "-d", "mysql://x"), 1, "an outbox needs SQLite or PostgreSQL"),
        (("status", "-d", "redis://x"), 1, "an outbox needs SQLite or PostgreSQL"),
        (("init", "-d", "sqlite://:memory:"), 1, "in-memory"),
        (("init", "-d", "sqlite:///{folder}/no/such.db"), 1, "unable to open"),
        (("status", "-d", "postgresql://nobody@127.0.0.1:1/x"), 1, "cannot be reached"),
        (("relay", "-d", "sqlite:///{folder}/x.db", "-b", "127.0.0.1:1"), 1, "no broker at 127.0.0.1:1"),
        (("relay", "-d", "sqlite:///{folder}/x.db", "-b", "{broker}"), 1, "x.db does not exist"),
        (
            ("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--shards", "0"),
            1,
            "1 to 256 shards",
        ),
        (("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--shard", "1"), 1, "no shard 1"),
        (("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--shard", "x"), 2, "a number or all"),
        (("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--batch", "0"), 1, "1 to 10000 rows"),
        (
            ("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--name", "a b"),
            1,
            "not an outbox name",
        ),
        (
            ("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--on-reject", "x"),
            2,
            "hold, skip, stop",
        ),
        (("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--property", "x"), 2, "NAME=VALUE"),
        (
            ("relay", "-d", "sqlite:///{folder}/ok.db", "-b", "{broker}", "--property", "no.such=1"),
            1,
            "refuses these settings",
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(
    outbox: Command, tmp_path: Path, bootstrap: str, words: tuple[str, ...], code: int, sentence: str
) -> None:
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("no database at all, " * 100)
    create_tables(f"sqlite:///{tmp_path / 'ok.db'}")
    places = {"folder": str(tmp_path), "broker": bootstrap}
    found, _, told = outbox(*(word.format(**places) for word in words))
    assert (found, sentence.format(**places) in told) == (code, True), told
    assert told.startswith("error: ")
    assert "Traceback" not in told


def test_a_database_without_tables_or_driver_is_told_of(
    outbox: Command, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "create it with `penstock outbox init`" in outbox("status", "-d", postgres_url)[2]
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install 'penstock[postgres]'" in outbox("status", "-d", postgres_url)[2]


def test_a_relay_that_is_told_to_stop_ends_well(
    sqlite_url: str, bootstrap: str, unique: Callable[[str], str]
) -> None:
    create_tables(sqlite_url)
    put(sqlite_url, unique("orders"), "v")
    flags = ["-d", sqlite_url, "-b", bootstrap, "--name", unique("outbox")[:90]]
    relay = subprocess.Popen(
        [*executable(), "outbox", "relay", *flags], env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: Shop(sqlite_url).waiting() == 0, what="relaying")
        os.kill(relay.pid, signal.SIGTERM)
        _, told = relay.communicate(timeout=20)
    finally:
        relay.kill()
    assert (relay.returncode, told.splitlines()[-1]) == (0, "1 row relayed")
