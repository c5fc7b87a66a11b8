"""Which brokers the watch reports: those that owe a response and do not answer a probe."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.waiting import eventually

from penstock.client.app.broker_watch import BrokerWatch
from penstock.client.app.wait_reporter import probe_brokers


def _is_watching() -> bool:
    return any(each.name == "penstock-watch" for each in threading.enumerate())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts connections, as the kernel does for a frozen process, and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def watch() -> Iterator[BrokerWatch]:
    made = BrokerWatch({})
    yield made
    made.end()
    eventually(lambda: not _is_watching(), what="the end of the watch")


def _address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _statistics(listener: socket.socket, *, waiting: int = 1, rx: int = 5, rxidle_ms: int = 800) -> str:
    broker: dict[str, Any] = {
        "name": "broker/1",
        "nodename": _address(listener),
        "waitresp_cnt": waiting,
        "rx": rx,
        "rxidle": rxidle_ms * 1000,
    }
    return json.dumps({"name": "client#1", "ts": 1, "brokers": {"broker/1": broker}, "topics": {}})


def _answer_one(listener: socket.socket) -> None:
    opened, _ = listener.accept()
    # A probe that has given up may have closed its connection.
    with opened, suppress(ConnectionError):
        opened.recv(100)
        opened.send(b"any answer")


def test_a_silent_broker_is_reported_until_it_answers(
    watch: BrokerWatch, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    watch.note_statistics(_statistics(listener))
    watch.note_statistics(_statistics(listener, rxidle_ms=1_300))
    eventually(lambda: f"broker {_address(listener)}: no reply; trying again" in caplog.text)

    def answer_all() -> None:
        while not is_done.is_set():
            _answer_one(listener)

    is_done = threading.Event()
    answering = threading.Thread(target=answer_all)
    answering.start()
    try:
        eventually(lambda: f"broker {_address(listener)} answers again" in caplog.text)
    finally:
        is_done.set()
        socket.create_connection(listener.getsockname()).close()
        answering.join()


def test_a_broker_that_answers_a_probe_holds_a_request_back_on_purpose(
    watch: BrokerWatch, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        watch.note_statistics(_statistics(listener, rxidle_ms=60_000))
    _answer_one(listener)
    eventually(lambda: not _is_watching(), what="the end of the probe")
    assert not caplog.records


@pytest.mark.parametrize(
    "second", [{"waiting": 0}, {"rx": 6}, {"rxidle_ms": 600}], ids=["nothing missing", "a response", "early"]
)
def test_brokers_that_respond_are_not_probed(
    watch: BrokerWatch, listener: socket.socket, second: dict[str, int]
) -> None:
    watch.note_statistics(_statistics(listener))
    watch.note_statistics(_statistics(listener, **second))
    assert not _is_watching()


def test_a_long_poll_that_the_user_chose_is_waited_for(listener: socket.socket) -> None:
    watch = BrokerWatch({"fetch.wait.max.ms": 5_000})
    for _ in range(2):
        watch.note_statistics(_statistics(listener, rxidle_ms=5_000))
    assert not _is_watching()


def test_a_broker_that_refuses_connections_is_left_to_the_client_library(
    watch: BrokerWatch, listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    port = listener.getsockname()[1]
    listener.close()
    watch.suspect(("127.0.0.1", port))
    eventually(lambda: not _is_watching(), what="the end of the probe")
    assert not caplog.records


def test_a_probe_of_a_broker_with_tls_begins_a_handshake(listener: socket.socket) -> None:
    received: list[bytes] = []

    def answer() -> None:
        opened, _ = listener.accept()
        with opened:
            received.append(opened.recv(2_000))
            opened.send(b"\x15")

    answering = threading.Thread(target=answer)
    answering.start()
    assert probe_brokers([listener.getsockname()], uses_tls=True, timeout_s=60.0) is None
    answering.join()
    assert received[0].startswith(b"\x16\x03")
