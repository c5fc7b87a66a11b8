"""Tests of the Spark side run where the `spark` extra is installed."""

from importlib.util import find_spec
from typing import Any

MISSING = [name for name in ("numba", "pyarrow") if find_spec(name) is None]
collect_ignore_glob = ["*"] if MISSING else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        names = " and ".join(MISSING)
        terminalreporter.write_line(f"tests/spark left out: no {names} here (pip install 'penstock[spark]')")
