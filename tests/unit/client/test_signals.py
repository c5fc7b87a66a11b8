"""Stopping by signals: a handler may interrupt the main thread anywhere, also within the event that it sets."""

import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

from penstock.client.signals import SignalEvent, stop_on_signals

WITHIN_S = 30


def test_an_event_can_be_set_by_a_handler_that_interrupts_any_line_of_it() -> None:
    """A trace function runs where a signal handler could, in the thread that it interrupts."""
    event = SignalEvent()

    def interrupt(frame: FrameType, kind: str, _: Any) -> Any:
        if frame.f_globals["__name__"] in ("penstock.client.signals", "threading"):
            event.set()
        return interrupt

    def use() -> None:
        sys.settrace(interrupt)
        event.set()
        event.wait(0)
        event.clear()
        event.wait(0.001)

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(WITHIN_S)
    assert not user.is_alive(), "it waits for a lock that it holds itself"
    assert event.wait(0)


def test_all_that_wait_are_woken_and_nothing_is_left_after_clear() -> None:
    event = SignalEvent()
    woken: list[bool] = []
    waiting = [threading.Thread(target=lambda: woken.append(event.wait(WITHIN_S))) for _ in range(3)]
    for each in waiting:
        each.start()
    event.set()
    for each in waiting:
        each.join(WITHIN_S)
    assert woken == [True] * 3
    assert event.is_set()
    event.clear()
    assert (event.is_set(), event.wait(0)) == (False, False)


def test_a_signal_ends_a_wait_without_a_time_limit() -> None:
    program = (
        "from penstock.client.signals import SignalEvent, stop_on_signals\n"
        "event = SignalEvent()\n"
        "with stop_on_signals(event.set):\n"
        "    print('waiting', flush=True)\n"
        "    print(event.wait())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WITHIN_S)[0] == "True\n"


def test_handlers_are_put_back_and_other_threads_have_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked: list[None] = []
    with stop_on_signals(lambda: asked.append(None)):
        signal.raise_signal(signal.SIGTERM)
    assert (len(asked), signal.getsignal(signal.SIGTERM)) == (1, before)
    seen: list[Any] = []

    def elsewhere() -> None:
        with stop_on_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(WITHIN_S)
    assert seen == [before]
