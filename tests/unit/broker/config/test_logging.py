"""The node's log: what operators read in it. A hostile client can neither forge lines nor flood it."""

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.broker.config.logging import (
    FIELD_CHARS_MAX,
    RateLimitedHandler,
    TextFormatter,
    configure_logging,
)

logger = logging.getLogger("penstock.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger("penstock")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


@pytest.fixture
def written() -> Callable[..., list[str]]:
    """`written(call, **options)` configures logging, calls, and returns the lines."""

    def run(call: Callable[[], Any], **options: Any) -> list[str]:
        stream = io.StringIO()
        configure_logging(stream=stream, **options)
        call()
        return stream.getvalue().splitlines()

    return run


def test_text_has_time_level_logger_message_and_fields(written: Callable[..., list[str]]) -> None:
    (line,) = written(
        lambda: logger.info("connection refused", extra={"peer": "1.2.3.4:5", "reason": "max connections"})
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO penstock\.test connection refused "
        r'peer=1\.2\.3\.4:5 reason="max connections"',
        line,
    )


def test_the_time_is_utc_to_the_millisecond() -> None:
    record = logging.makeLogRecord(
        {"name": "penstock", "levelname": "INFO", "msg": "x", "created": 1767323045.6784}
    )
    assert TextFormatter().format(record) == "2026-01-02T03:04:05.678Z INFO penstock x"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12, "12"),
        (None, "None"),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("größe", "größe"),
        ("one\ntwo", '"one\\ntwo"'),
        ("\x1b[2J\u2028", '"\\u001b[2J\\u2028"'),
        (r"C:\x", '"C:\\\\x"'),
    ],
)
def test_a_field_cannot_be_mistaken_for_anything_else(
    written: Callable[..., list[str]], value: object, shown: str
) -> None:
    (line,) = written(lambda: logger.warning("bad request", extra={"reason": value}))
    assert line.endswith(f" bad request reason={shown}")


def test_a_message_stays_on_one_line(written: Callable[..., list[str]]) -> None:
    (line,) = written(lambda: logger.warning("client %s", "x\n2026-01-01T00:00:00.000Z INFO penstock forged"))
    assert "x\\n2026" in line


def test_a_long_field_is_cut(written: Callable[..., list[str]]) -> None:
    (text,) = written(lambda: logger.warning("bad request", extra={"client_id": "x" * 30_000}))
    (line,) = written(lambda: logger.warning("bad request", extra={"client_id": "x" * 30_000}), format="json")
    assert len(text) < FIELD_CHARS_MAX + 100
    assert json.loads(line)["fields"]["client_id"] == "x" * FIELD_CHARS_MAX + "..."


def _fail() -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        logger.exception("request failed", extra={"peer": "1.2.3.4:5"})


def test_text_is_followed_by_the_traceback(written: Callable[..., list[str]]) -> None:
    first, *rest = written(_fail)
    assert first.endswith("ERROR penstock.test request failed peer=1.2.3.4:5")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: no such thing"


def test_json_is_one_object_per_line(written: Callable[..., list[str]]) -> None:
    def log() -> None:
        _fail()
        logger.info("listening\non", extra={"port": 9092, "hosts": ("a", "b"), "ok": True})

    failed, listening = map(json.loads, written(log, format="json"))
    assert {key: failed[key] for key in ("level", "logger", "message", "fields")} == {
        "level": "ERROR",
        "logger": "penstock.test",
        "message": "request failed",
        "fields": {"peer": "1.2.3.4:5"},
    }
    assert failed["exception"].endswith("ValueError: no such thing")
    assert listening["fields"] == {"port": 9092, "hosts": "('a', 'b')", "ok": True}
    assert listening["message"] == "listening\non"
    assert "exception" not in listening
    assert listening["ts"].endswith("Z")


def test_the_level_decides_what_is_written(written: Callable[..., list[str]]) -> None:
    def log() -> None:
        logger.debug("a")
        logger.info("b")
        logger.error("c")

    assert [line.split()[-1] for line in written(log, level="info")] == ["b", "c"]
    assert [line.split()[-1] for line in written(log, level="debug")] == ["a", "b", "c"]
    assert [line.split()[-1] for line in written(log, level="error")] == ["c"]


def test_configuring_again_replaces_what_was_configured() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


class _Flood:
    """A handler whose clock the test sets."""

    def __init__(self, burst_lines: int, lines_per_second: float) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = RateLimitedHandler(
            self.stream, burst_lines=burst_lines, lines_per_second=lines_per_second, clock=lambda: self.now
        )
        self.handler.setFormatter(TextFormatter())

    def log(self, message: str, times: int = 1, level: int = logging.WARNING) -> None:
        for number in range(times):
            record = logging.LogRecord("penstock.server", level, "", 0, message, (), None)
            record.peer = number
            self.handler.handle(record)

    @property
    def messages(self) -> list[str]:
        return [line.split("penstock.server ")[1] for line in self.stream.getvalue().splitlines()]


def test_a_flood_is_cut_off_and_counted() -> None:
    flood = _Flood(burst_lines=3, lines_per_second=0.5)
    flood.log("bad request", 1000)
    assert len(flood.messages) == 3
    assert flood.handler.suppressed_lines == 997
    flood.now = 2.0
    flood.log("bad request", 5)
    assert flood.messages[3:] == ["bad request peer=0 suppressed=997"]
    flood.now = 4.0
    flood.log("bad request")
    assert flood.messages[4:] == ["bad request peer=0 suppressed=4"]


def test_a_flood_of_one_kind_does_not_hide_another() -> None:
    flood = _Flood(burst_lines=1, lines_per_second=1)
    flood.log("bad request", 10)
    flood.log("connection refused")
    assert flood.messages == ["bad request peer=0", "connection refused peer=0"]


def test_what_is_critical_is_always_written() -> None:
    flood = _Flood(burst_lines=1, lines_per_second=1)
    flood.log("fsync failed", 5, logging.CRITICAL)
    assert len(flood.messages) == 5


def test_what_was_left_out_is_told_at_the_end() -> None:
    flood = _Flood(burst_lines=1, lines_per_second=1)
    flood.log("bad request", 8)
    flood.handler.close()
    assert flood.messages[-1] == 'lines suppressed of="bad request" suppressed=7'


def test_the_kinds_remembered_are_bounded() -> None:
    flood = _Flood(burst_lines=2, lines_per_second=0)
    for number in range(5000):
        flood.log(f"made up {number}")
    assert len(flood.messages) == 1002


def test_the_audit_trail_is_not_limited_and_limits_no_other_event(written: Callable[..., list[str]]) -> None:
    """Each of its lines is a message of its own: they would use up the kinds, and then be left out with all others."""

    def log() -> None:
        for number in range(1500):
            logging.getLogger("penstock.audit").info(f'{{"number": {number}}}')
        for _ in range(3):
            logger.warning("something new")

    lines = written(log, burst_lines=2)
    assert sum("penstock.audit" in line for line in lines) == 1500
    assert sum("something new" in line for line in lines) == 2
