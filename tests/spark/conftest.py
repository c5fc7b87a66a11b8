"""Tests of the Spark side run where the `spark` extra is installed, with one Spark session for all of them."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from penstock.spark.checkpoints import FILE_MANAGER, WITHOUT_PROCESSES

MISSING = [name for name in ("numba", "pyarrow", "pyspark") if find_spec(name) is None]
collect_ignore_glob = ["*"] if MISSING else []

#: Nothing here is large enough to be worth more, and every task costs a worker.
SPARK_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    #: All checkpoints of tests are on the local disk.
    FILE_MANAGER: WITHOUT_PROCESSES,
    #: Queries are over before the better compiler and the parallel collectors have paid for themselves.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        names = " and ".join(MISSING)
        terminalreporter.write_line(f"tests/spark left out: no {names} here (pip install 'penstock[spark]')")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """One session for all tests: it takes seconds to start."""
    from penstock.spark.session import session

    made = session("penstock-tests", master="local[2,4]", settings=SPARK_SETTINGS)
    yield made
    made.stop()
