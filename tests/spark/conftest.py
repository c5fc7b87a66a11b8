"""Tests of the Spark integration need the `spark` extra. They share one Spark session."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.spark.class_archive import QUICK_JAVA

from penstock.spark.session import FILE_MANAGER_SETTING, FILE_MANAGER_WITHOUT_PROCESSES

MISSING = [name for name in ("numba", "pyarrow", "pyspark") if find_spec(name) is None]
collect_ignore_glob = ["*"] if MISSING else []

#: The data in tests is small, and every task needs a worker.
SPARK_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    #: All checkpoints of tests are on the local disk.
    FILE_MANAGER_SETTING: FILE_MANAGER_WITHOUT_PROCESSES,
}
#: The limit ends a test that hangs. It is long because Spark is slow on a busy machine.
HANG_S = 900


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        names = " and ".join(MISSING)
        terminalreporter.write_line(f"tests/spark left out: no {names} here (pip install 'penstock[spark]')")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(HANG_S))


@pytest.fixture(autouse=True)
def quick_java(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICK_JAVA.items():
        monkeypatch.setenv(name, value)


class SharedSession:
    """The session that tests share, because it takes seconds to start.

    A test that times out inside py4j leaves an unread reply on the connection, so every later call would get the reply
    of the one before. Such a test closes the session, and the next test starts a new one.
    """

    def __init__(self) -> None:
        self._session: Any = None

    def get(self) -> Any:
        from penstock.spark.session import session

        if self._session is None:
            self._session = session("penstock-tests", master="local[2,4]", settings=SPARK_SETTINGS)
        return self._session

    def discard(self) -> None:
        """Drop the session without a call to the JVM, which may never answer."""
        from pyspark import SparkContext

        from penstock.spark.session import forget_dead_jvm

        self._session = None
        gateway = SparkContext._gateway
        if gateway is None:
            return
        gateway.proc.kill()
        gateway.proc.wait()
        with suppress(Exception):
            gateway.shutdown_callback_server()
        forget_dead_jvm()

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()


_SHARED = SharedSession()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Run before the test's fixtures are torn down, so that these do not wait for a session that hangs."""
    report = yield
    if (
        call.excinfo is not None
        and "spark" in getattr(item, "fixturenames", ())
        and _is_timeout(call.excinfo)
    ):
        _SHARED.discard()
    return report


def _is_timeout(raised: pytest.ExceptionInfo[BaseException]) -> bool:
    return raised.errisinstance(pytest.fail.Exception) and str(raised.value).startswith("Timeout (>")


@pytest.fixture(scope="session")
def _shared_session() -> Iterator[SharedSession]:
    yield _SHARED
    _SHARED.stop()


@pytest.fixture(scope="session")
def kafka_topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Topics on Apache Kafka, for tests that are marked with `apache_kafka.NEEDED`."""
    from tests.compat.apache_kafka import ApacheKafka
    from tests.spark.source.topics import Topics  # needs the `spark` extra

    kafka = ApacheKafka(tmp_path_factory.mktemp("kafka"), ["PLAINTEXT"], {}).start()
    yield Topics(kafka.address("PLAINTEXT"))
    kafka.stop()


@pytest.fixture
def spark(_shared_session: SharedSession) -> Any:
    return _shared_session.get()
