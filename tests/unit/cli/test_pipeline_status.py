"""The status of a pipeline: readable errors from Spark's stack traces, and gaps between batches."""

import json
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from penstock.client.errors import AuthenticationFailed, Unavailable
from penstock.spark.offsets import Position
from penstock.spark.pipelines.queries import QueryFailed, WatchedQuery, error_info, is_permanent
from penstock.spark.pipelines.status import ErrorInfo
from penstock.spark.source.discovery import DataLoss

PROXY = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/lib/py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
  File "/home/shop.py", line 25, in bad
    {raised}
{end}

=== Streaming Query ===
Identifier: bad [id = ac8ecfab, runId = 601db03f]
Current State: ACTIVE
"""
WORKER = """pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/home/shop.py", line 29, in f
    raise ValueError("no such thing")
ValueError: no such thing
second line"""
SOURCE = """[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform \
initialOffset: penstock.spark.option_reader.OptionError: offset 99 of t[0] does not exist yet: its log ends at 10
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: loss"""
SPARK = """[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x` cannot be resolved. SQLSTATE: 42703;
'Project ['x]
+- Relation

JVM stacktrace:
org.apache.spark.sql.catalyst.ExtendedAnalysisException
	at org.apache.spark.sql"""


class AnalysisException(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "message", "lasting"),
    [
        (Exception(PROXY.format(raised="1 / 0", end="ZeroDivisionError: division by zero")),
         "ZeroDivisionError", "division by zero", False),
        (Exception(PROXY.format(raised="run()", end="penstock.spark.pipelines.declaration.BatchError: too many")),
         "BatchError", "too many", False),
        (Exception(PROXY.format(raised="run()", end="penstock.spark.exactly_once.decisions.SinkError: another driver")),
         "SinkError", "another driver", True),
        (Exception(PROXY.format(raised="run()", end=WORKER)), "ValueError", "no such thing", False),
        (Exception(SOURCE), "OptionError", "offset 99 of t[0] does not exist yet: its log ends at 10", True),
        (AnalysisException(SPARK), "AnalysisException", "A column with name `x` cannot be resolved.", True),
        (RuntimeError("plain\nand more"), "RuntimeError", "plain", False),
        (RuntimeError(), "RuntimeError", "RuntimeError", False),
        (Unavailable("nobody answered"), "Unavailable", "nobody answered", False),
        (AuthenticationFailed("no"), "AuthenticationFailed", "no", True),
        (DataLoss("gone"), "DataLoss", "gone", True),
        (QueryFailed(ErrorInfo(kind="X", message="y")), "X", "y", False),
    ],
)  # fmt: skip
def test_an_error_is_a_sentence(error: Exception, kind: str, message: str, lasting: bool) -> None:
    told = error_info(error)
    assert told == ErrorInfo(kind=kind, message=message)
    assert is_permanent(told) is lasting


class Query:
    """As much of a query as is looked at."""

    isActive = True

    def __init__(self) -> None:
        self.status = {"message": "Initializing sources", "isTriggerActive": False}
        self.recentProgress: list[Any] = []

    @property
    def lastProgress(self) -> Any:
        return self.recentProgress[-1] if self.recentProgress else None

    def tell(self, batch: int, rows: int, batch_ms: int = 500) -> None:
        end = json.dumps(Position.of({("t", 0): rows}, {"t": UUID(int=1)}).to_json())
        self.recentProgress.append(
            SimpleNamespace(
                id="q",
                batchId=batch,
                numInputRows=rows,
                batchDuration=batch_ms,
                timestamp=f"2030-01-01T00:00:{len(self.recentProgress):02}Z",
                sources=[SimpleNamespace(endOffset=end)],
                sink=SimpleNamespace(numOutputRows=-1),
            )
        )


@pytest.mark.parametrize(
    ("step", "triggered", "is_between", "is_at_work", "is_decided"),
    [
        ("Initializing sources", False, True, False, False),
        ("Getting offsets from X", True, True, False, False),
        ("Writing offsets to log", True, False, True, True),
        ("Processing new data", True, False, True, True),
        ("Waiting for next trigger", False, True, False, True),
        ("Waiting for data to arrive", True, True, False, True),
        ("Something else", True, False, False, True),
    ],
)
def test_a_query_is_stopped_only_where_nothing_of_a_batch_is_done(
    step: str, triggered: bool, is_between: bool, is_at_work: bool, is_decided: bool
) -> None:
    query = Query()
    query.status = {"message": step, "isTriggerActive": triggered}
    seen = WatchedQuery(query).activity()
    assert (seen.is_between, seen.is_at_work, seen.is_decided) == (is_between, is_at_work, is_decided)


def test_every_batch_is_news_once_and_empty_ones_are_none() -> None:
    query = Query()
    watched = WatchedQuery(query)
    assert watched.new_batches() == []
    query.tell(0, 10)
    query.tell(1, 20)
    query.tell(2, 0)
    first, second = watched.new_batches()
    assert (first.batch, first.rows_per_s, second.batch, second.rows) == (0, 20.0, 1, 20)
    assert second.end.offsets == {("t", 0): 20}
    assert watched.new_batches() == []
    query.tell(2, 5)
    assert [each.batch for each in watched.new_batches()] == [2]
