"""Which relays may run at the same time, without a database."""

import threading
from typing import Any

import pytest

from penstock.client.outbox import relay
from penstock.client.outbox.database import RelayAgreement
from penstock.client.outbox.messages import OutboxError, RelayInterrupted
from penstock.client.outbox.relay import agree_on_shards


class Table:
    """What all relays of a database see."""

    def __init__(self) -> None:
        self.agreement: RelayAgreement | None = None
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

    def agreement(self) -> RelayAgreement | None:
        return self.table.agreement

    def agree(self, name: str, shards: int) -> None:
        assert self.table.alone is self, "only who is alone may change it"
        self.table.agreement = RelayAgreement("identity", name, shards)


def start(
    table: Table, shards: int, name: str = "shop", settled: list[RelayAgreement] | None = None
) -> RelayAgreement | None:
    settle: Any = (settled if settled is not None else []).append
    session: Any = Session(table)
    return agree_on_shards(session, name, shards, settle=settle, stopping=threading.Event())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "AGREEMENT_TIMEOUT_MS", 100)


def test_relays_that_divide_alike_work_together() -> None:
    table, settled = Table(), []
    for _ in range(3):
        assert start(table, 4, settled=settled) == RelayAgreement("identity", "shop", 4)
    assert len(table.together) == 3
    assert settled == [], "there is nothing before the first"


@pytest.mark.parametrize(("name", "shards"), [("shop", 8), ("other", 4)])
def test_relays_of_another_kind_are_refused_while_one_is_at_work(name: str, shards: int) -> None:
    table = Table()
    start(table, 4)
    with pytest.raises(OutboxError, match=r"run with 4 shards under the name shop: stop all of them"):
        start(table, shards, name)
    assert table.agreement == RelayAgreement("identity", "shop", 4)


def test_pending_rows_of_other_relays_are_settled_before_rows_are_divided_again() -> None:
    table, settled = Table(), []
    start(table, 4)
    table.together.clear()
    assert start(table, 8, settled=settled) == RelayAgreement("identity", "shop", 8)
    assert settled == [RelayAgreement("identity", "shop", 4)]


def test_rows_are_not_divided_again_before_pending_rows_are_settled() -> None:
    table = Table()
    start(table, 4)
    table.together.clear()

    def settle(before: RelayAgreement) -> None:
        raise RelayInterrupted("no broker")

    session: Any = Session(table)
    with pytest.raises(RelayInterrupted):
        agree_on_shards(session, "shop", 8, settle=settle, stopping=threading.Event())
    assert table.agreement == RelayAgreement("identity", "shop", 4)


def test_stopping_ends_the_wait() -> None:
    table, stopping = Table(), threading.Event()
    start(table, 4)
    stopping.set()
    session: Any = Session(table)
    assert agree_on_shards(session, "shop", 8, settle=lambda before: None, stopping=stopping) is None
