"""Dead letters that could not be published are reported until they are settled."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.client.app.failures import FailurePublisher, FailureRecord
from penstock.client.app.figures import Figures
from penstock.client.app.publisher import Published
from penstock.client.errors import NotPublished

FIGURES = Figures()
LETTER = FailureRecord("orders.retry.1", 0, None, b"", [], 0, False)


def box(*outcomes: Exception | None, gives_up: bool = False) -> FailurePublisher:
    futures = []
    for outcome in outcomes:
        future: Future[Published] = Future()
        future.set_exception(outcome) if outcome else future.set_result(Published("orders.retry.1", 0, 1))
        futures.append(future)
    failing: Any = None
    made = FailurePublisher(failing, lambda letter: futures.pop(0), FIGURES, waits=False, gives_up=gives_up)
    for _ in outcomes:
        made.send(LETTER)
    return made


def test_nothing_is_settled_while_a_letter_is_not_there() -> None:
    """A member that leaves the group commits, unless the error is reported again."""
    letters = box(None, NotPublished("no"), None)
    for _ in range(2):
        with pytest.raises(NotPublished):
            letters.settle()


def test_letters_that_are_there_are_settled() -> None:
    letters = box(None, None)
    letters.settle()
    letters.settle()


def test_two_threads_that_settle_at_once_leave_no_later_letter_out() -> None:
    """The second one must not take a letter that came meanwhile for one of those it has waited for."""
    first, later = Future[Published](), Future[Published]()
    posted, awaited = [first, later], list[Future[Published]]()
    first_waits, later_is_sent = threading.Event(), threading.Event()

    def await_published(future: Future[Published], timeout_s: float) -> Published:
        awaited.append(future)
        first_waits.set()
        if threading.current_thread().name == "second" and future is first:
            later_is_sent.wait(60)
        return future.result(60)

    failing: Any = None
    letters = FailurePublisher(
        failing, lambda letter: posted.pop(0), FIGURES, waits=False, await_published=await_published
    )
    letters.send(LETTER)
    threads = [threading.Thread(target=letters.settle, name=name) for name in ("first", "second")]
    threads[0].start()
    assert first_waits.wait(60)
    threads[1].start()
    first.set_result(Published("orders.retry.1", 0, 1))
    threads[0].join()
    letters.send(LETTER)
    later_is_sent.set()
    later.set_result(Published("orders.retry.1", 0, 2))
    threads[1].join()
    letters.settle()
    assert awaited == [first, later]


def test_at_most_once_drops_a_letter_that_cannot_be_published_and_counts_it() -> None:
    before = FIGURES.dropped
    box(None, NotPublished("no"), None, gives_up=True).settle()
    assert FIGURES.dropped == before + 1
