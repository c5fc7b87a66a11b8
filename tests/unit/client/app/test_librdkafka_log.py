"""The log of librdkafka: a broker that is down is logged once in a while, not twenty times a second."""

import logging

import pytest

from penstock.client.app.librdkafka import FailureFilter

REFUSED = "[thrd:{0}]: {0}: Connect to ipv4#{0} failed: Connection refused (after {1}ms in state CONNECT{2})"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> logging.Logger:
    made = logging.Logger("library")
    made.addFilter(FailureFilter(clock))
    made.addHandler(caplog.handler)
    return made


def fail(log: logging.Logger, address: str, after_ms: int = 0, more: str = "") -> None:
    """As confluent-kafka hands it over."""
    log.log(
        logging.ERROR, "%s [%s] %s", "FAIL", "billing#consumer-1", REFUSED.format(address, after_ms, more)
    )


def test_the_same_failure_is_told_once_in_a_while(
    log: logging.Logger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fail(log, "a:1")
    fail(log, "a:1", after_ms=3)
    fail(log, "a:1", after_ms=1, more=", 7 identical error(s) suppressed")
    assert len(caplog.records) == 1
    fail(log, "b:1")
    assert len(caplog.records) == 2, "another broker is another failure"
    clock.now_s = 11.0
    fail(log, "a:1")
    assert len(caplog.records) == 3


def test_everything_else_is_told_each_time(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        log.warning("%s [%s] %s", "SESSTMOUT", "billing#consumer-1", "session timed out")
        log.warning("plain words")
    assert len(caplog.records) == 6
