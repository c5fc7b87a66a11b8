"""Which relays may be at work together, without a database."""

import threading
from typing import Any

import pytest

from penstock.client.outbox import agreeing
from penstock.client.outbox.agreeing import agree
from penstock.client.outbox.databases.base import Agreement
from penstock.client.outbox.errors import Disturbed, OutboxError


class Table:
    """What all relays of a database see."""

    def __init__(self) -> None:
        self.agreement: Agreement | None = None
        self.together: set[object] = set()
        self.alone: object | None = None


class Session:
    """Of one relay, as `Database` has it."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def hold_table(self, *, alone: bool) -> bool:
        others = self.table.together - {self}
        if self.table.alone is not None or (alone and others):
            return False
        if alone:
            self.table.alone = self
        else:
            self.table.together.add(self)
        return True

    def release_table(self) -> None:
        self.table.together.discard(self)
        self.table.alone = None

    def agreement(self) -> Agreement | None:
        return self.table.agreement

    def agree(self, name: str, shards: int) -> None:
        assert self.table.alone is self, "only who is alone may change it"
        self.table.agreement = Agreement("identity", name, shards)


def start(
    table: Table, shards: int, name: str = "shop", settled: list[Agreement] | None = None
) -> Agreement | None:
    settle: Any = (settled if settled is not None else []).append
    session: Any = Session(table)
    return agree(session, name, shards, settle=settle, stopping=threading.Event())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "PATIENCE_MS", 100)


def test_relays_that_divide_alike_work_together() -> None:
    table, settled = Table(), []
    for _ in range(3):
        assert start(table, 4, settled=settled) == Agreement("identity", "shop", 4)
    assert len(table.together) == 3
    assert settled == [], "there is nothing before the first"


@pytest.mark.parametrize(("name", "shards"), [("shop", 8), ("other", 4)])
def test_relays_of_another_kind_are_refused_while_one_is_at_work(name: str, shards: int) -> None:
    table = Table()
    start(table, 4)
    with pytest.raises(OutboxError, match=r"at work with 4 shards under the name shop: stop them all"):
        start(table, shards, name)
    assert table.agreement == Agreement("identity", "shop", 4)


def test_what_the_others_have_left_is_settled_before_rows_are_divided_anew() -> None:
    table, settled = Table(), []
    start(table, 4)
    table.together.clear()
    assert start(table, 8, settled=settled) == Agreement("identity", "shop", 8)
    assert settled == [Agreement("identity", "shop", 4)]


def test_rows_are_not_divided_anew_unless_it_is_settled() -> None:
    table = Table()
    start(table, 4)
    table.together.clear()

    def settle(before: Agreement) -> None:
        raise Disturbed("no broker")

    session: Any = Session(table)
    with pytest.raises(Disturbed):
        agree(session, "shop", 8, settle=settle, stopping=threading.Event())
    assert table.agreement == Agreement("identity", "shop", 4)


def test_stopping_ends_the_wait() -> None:
    table, stopping = Table(), threading.Event()
    start(table, 4)
    stopping.set()
    session: Any = Session(table)
    assert agree(session, "shop", 8, settle=lambda before: None, stopping=stopping) is None
