"""At most once, whatever dies: the short campaign, and whether its book would notice.

`make chaos ARGS="--campaign once"` has 10,000 kill points.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.once.campaign import BROKER, POINT, WORKER, Campaign, Plan
from tests.chaos.once.lanes import Book
from tests.chaos.once.points import ACK_SENT, GOT, NO_KILL, Report
from tests.chaos.share.journals import RecordPosition

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


@needs_nodes
def test_nothing_is_delivered_twice(tmp_path: Path) -> None:
    plan = Plan(points=60, broker_kills=1, process_kills=2, calm_rounds=1, lanes=8, processes=2, seed=1)
    outcome = Campaign(tmp_path, plan).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert (outcome.fired[BROKER], outcome.fired[WORKER]) == (1, 2)
    assert outcome.fired[POINT] >= plan.points
    assert outcome.least_work > 0


def test_the_book_notices_what_comes_twice() -> None:
    book, place = Book(), RecordPosition(0, 7)
    book.add(Report(GOT, True, (place,)))
    assert (book.doubled, book.points_count) == ([], 1)
    book.add(Report(ACK_SENT, True, (place, RecordPosition(1, 7)), doubtful=2))
    assert len(book.doubled) == 1
    assert (book.confirmed, book.doubtful) == (0, 2)


def test_only_who_is_not_killed_is_calm() -> None:
    book = Book()
    book.add(Report(NO_KILL, True, (RecordPosition(0, 1),), confirmed=1))
    book.add(Report(NO_KILL, True, (RecordPosition(0, 2),), doubtful=1))
    book.add(Report(GOT, True, (RecordPosition(0, 3),)))
    assert book.calm == {RecordPosition(0, 1)}
    assert book.points_count == 1
