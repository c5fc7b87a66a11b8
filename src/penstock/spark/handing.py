"""Handing rows to Python: in batches of so many rows, not of so many bytes.

Spark would measure a batch after every row that it adds. Where a column holds others, such as headers, that takes four
times as long as all the rest together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_UNLIMITED: Final = str(2**31 - 1)
#: Few enough for records as large as brokers take them by default, and as fast as more.
_ROWS: Final = "1000"
_SETTINGS: Final = {
    "spark.sql.execution.arrow.maxBytesPerBatch": _UNLIMITED,
    "spark.sql.execution.arrow.maxRecordsPerBatch": _ROWS,
}


@contextmanager
def handed_by_number(spark: Any) -> Iterator[None]:
    """For what is run meanwhile. A streaming query has settings of its own, so it changes nobody else's."""
    before = {name: spark.conf.get(name) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
