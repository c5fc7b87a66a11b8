"""The report of an error of Spark names its innermost cause."""

import pytest

from penstock.client.errors import Unavailable
from penstock.spark.pipelines.queries import (
    error_info,
    failed_range,
    failure_from_spark,
    is_caused_by_rows,
    is_permanent,
)

OF_PYTHON = """[FOREACH_BATCH_USER_FUNCTION_ERROR] An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "pyspark/worker.py", line 1, in main
    process()
Traceback (most recent call last):
  File "orders.py", line 7, in price
    raise KeyError("amount")
KeyError: 'amount'

	at org.apache.spark.api.python.BasePythonRunner
"""
#: An error of ours as tasks report it.
WITHOUT_TRACEBACK = """Job aborted due to stage failure: Lost task 0.3 in stage 7.0:
org.apache.spark.api.python.PythonException: penstock.%s

	at org.apache.spark.api.python.BasePythonRunner
"""
POSITION = '{"version": 1, "topics": {"t": {"id": "9931d8ee-3d2a-42d1-a4a8-ebcd25e79e63", "offsets": %s}}}'
ENDED = f"""[STREAM_FAILED] Query terminated with exception: boom
Current Committed Offsets: {{Stream@1: {POSITION % '{"0": 5, "1": 2}'}}}
Current Available Offsets: {{Stream@1: {POSITION % '{"0": 9, "1": 2}'}}}

Current State: ACTIVE
"""


def test_the_innermost_python_error():
    found = failure_from_spark(Exception(OF_PYTHON))
    assert (found.error_class, found.message) == ("KeyError", "'amount'")
    assert 'raise KeyError("amount")' in found.stack
    assert "worker.py" not in found.stack
    assert "BasePythonRunner" not in found.stack


def test_errors_that_are_reported_without_a_traceback():
    found = failure_from_spark(
        Exception(WITHOUT_TRACEBACK % "spark.sink.records.WrongRow: a row has no topic")
    )
    assert (found.error_class, found.message) == (
        "penstock.spark.sink.records.WrongRow",
        "a row has no topic",
    )


def test_other_errors_by_their_first_line():
    found = failure_from_spark(ValueError("\n[CAST_INVALID_INPUT] no number\n== SQL =="))
    assert (found.error_class, found.message) == ("ValueError", "[CAST_INVALID_INPUT] no number")


@pytest.mark.parametrize(
    ("error", "is_theirs"),
    [
        (Exception("[USER_RAISED_EXCEPTION] poison"), True),
        (Unavailable("no broker answers"), False),
        (Exception("An error occurred while calling o1.save.\n: java.lang.InterruptedException"), False),
        (Exception("[SPARK_JOB_CANCELLED] Job 5 cancelled"), False),
        (Exception(WITHOUT_TRACEBACK % "client.errors.Unavailable: no broker answers"), False),
        (
            Exception(OF_PYTHON.replace("KeyError: 'amount'", "ModuleNotFoundError: No module named 'x'")),
            False,
        ),
        (Exception(WITHOUT_TRACEBACK % "client.errors.Refused: t[0]: topic authorization failed"), False),
        (Exception(WITHOUT_TRACEBACK % "client.errors.RecordsRefused: t[0]: message too large"), True),
        (Exception(WITHOUT_TRACEBACK % "spark.sink.records.WrongRow: a row has no topic"), True),
        (Exception(WITHOUT_TRACEBACK % "spark.sink.records.RecordTooLarge: a record of 9 bytes"), True),
        (Exception(OF_PYTHON.replace("KeyError: 'am", "penstock.client.errors.Unavailable: 'am")), False),
    ],
)
def test_whether_rows_may_be_the_cause(error, is_theirs):
    assert is_caused_by_rows(error) is is_theirs


def test_the_offsets_of_the_failed_batch():
    assert failed_range(Exception(ENDED)) == "t[0] 5 to 8"
    assert failed_range(Exception("boom")) is None


def test_a_missing_module_is_permanent_and_the_message_says_what_to_install():
    text = OF_PYTHON.replace("KeyError: 'amount'", "ModuleNotFoundError: No module named 'pandas'")
    found = error_info(Exception(text))
    assert found.message.startswith(
        "No module named 'pandas' (install it wherever tasks of this pipeline run"
    )
    assert is_permanent(found)
