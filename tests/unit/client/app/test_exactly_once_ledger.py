"""Exactly once with a ledger: of a message that exists twice, one result is kept."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.contracts import HandledIds
from penstock.client.app.exactly_once import LedgerPositions, handle_in_ledger
from penstock.client.app.figures import Figures
from penstock.client.deadletters.headers import Failure, Origin, failure_headers
from penstock.client.ledgers import open_ledger

GROUP, ORDERS, RETRIES = "billing", "orders", "orders.retry.1"


class Raw(RawMessage):
    """`first` is the offset of the message in the topic that it was first in."""

    def __init__(self, topic: str, offset: int, first: int | None = None) -> None:
        headers: list[Any] = []
        if first is not None:
            origin = Origin(topic=ORDERS, partition=0, offset=first, timestamp_ms=0)
            failure = Failure(error_class="", message="")
            headers = failure_headers([], origin, failure, group=GROUP, attempts=1)
        super().__init__(offset, topic=topic, headers=headers)


class Member:
    def __init__(self, url: str) -> None:
        self._ledger = open_ledger(url)
        self.figures = Figures()
        self.book = LedgerPositions(self._ledger, GROUP, "one")
        self.book.take([(ORDERS, 0), (RETRIES, 0)])
        marks = HandledIds(self._ledger.marks(), f"{GROUP}.retries", 60.0)
        self.handle = handle_in_ledger(self._call, self.book, "connection", marks, self.figures)
        self.fails = False

    def _call(self, raw: Raw, connection: Any) -> None:
        connection.execute("INSERT INTO bills VALUES (?)", (raw.topic() + str(raw.offset()),))
        if self.fails:
            raise ValueError("not yet")

    def bills(self) -> list[str]:
        with self._ledger.transaction() as transaction:
            return [name for (name,) in transaction.connection.execute("SELECT * FROM bills")]

    def close(self) -> None:
        self._ledger.close()


@contextmanager
def member(folder: Path) -> Iterator[Member]:
    with closing(Member(f"sqlite:///{folder}/ledger.db")) as made:
        with made._ledger.transaction() as transaction:
            transaction.connection.execute("CREATE TABLE IF NOT EXISTS bills (name)")
        yield made


def test_the_first_message_of_a_new_owner_may_have_a_letter_already(tmp_path: Path) -> None:
    with member(tmp_path) as one:
        one.handle(Raw(ORDERS, 0))
    with member(tmp_path) as two:
        two.handle(Raw(ORDERS, 1))
        two.handle(Raw(ORDERS, 2))
        two.handle(Raw(RETRIES, 0, first=1))
        assert two.bills() == ["orders0", "orders1", "orders2"]
        assert two.figures.duplicates == 1


def test_of_two_letters_one_counts(tmp_path: Path) -> None:
    with member(tmp_path) as one:
        one.handle(Raw(RETRIES, 0, first=7))
        one.handle(Raw(RETRIES, 1, first=8))
        one.handle(Raw(RETRIES, 2, first=7))
        assert one.bills() == ["orders.retry.10", "orders.retry.11"]


def test_a_dead_letter_whose_handler_fails_is_not_claimed(tmp_path: Path) -> None:
    with member(tmp_path) as one:
        one.fails = True
        with pytest.raises(ValueError, match="not yet"):
            one.handle(Raw(RETRIES, 0, first=7))
        one.fails = False
        one.handle(Raw(RETRIES, 1, first=7))
        assert one.bills() == ["orders.retry.11"]
