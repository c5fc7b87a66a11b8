"""Parts of the demo that fail: the error is shown in one line, and they retry."""

import threading

import pytest

from penstock.client.errors import Unavailable
from penstock.demo import component
from penstock.demo.scene import EventLog


class Flaky(component.Component):
    def __init__(self) -> None:
        super().__init__("flaky")
        self.tries = 0
        self.failed, self.may_go_on, self.worked = threading.Event(), threading.Event(), threading.Event()

    def work(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise Unavailable("nobody is there\nand more")
        self.failed.set()
        self.may_go_on.wait(60)
        self.trouble = None
        self.worked.set()
        self.stopping.wait()


def test_a_part_that_fails_says_why_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "RETRY_PAUSE_S", 0.01)
    part, journal = Flaky(), EventLog()
    part.start()
    assert part.failed.wait(60)
    journal.watch([part])
    part.may_go_on.set()
    assert part.worked.wait(60)
    journal.watch([part])
    part.stop()
    assert part.join(60)
    assert [event.text for event in journal.events] == ["flaky: nobody is there", "flaky works again"]
    assert [event.is_trouble for event in journal.events] == [True, False]


def test_who_reads_the_journal_hears_each_event_once() -> None:
    journal = EventLog()
    journal.add("one")
    seen, events = journal.since(0)
    assert [event.text for event in events] == ["one"]
    assert journal.since(seen) == (1, ())
    journal.add("two")
    assert [event.text for event in journal.since(seen)[1]] == ["two"]
