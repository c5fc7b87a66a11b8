"""What Spark raises is told as what went wrong, in the words of who raised it first."""

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
#: As tasks tell of errors of ours.
TOLD_PLAINLY = """Job aborted due to stage failure: Lost task 0.3 in stage 7.0:
org.apache.spark.api.python.PythonException: penstock.%s

	at org.apache.spark.api.python.BasePythonRunner
"""
POSITION = '{"version": 1, "topics": {"t": {"id": "9931d8ee-3d2a-42d1-a4a8-ebcd25e79e63", "offsets": %s}}}'
ENDED = f"""[STREAM_FAILED] Query terminated with exception: boom
Current Committed Offsets: {{Stream@1: {POSITION % '{"0": 5, "1": 2}'}}}
Current Available Offsets: {{Stream@1: {POSITION % '{"0": 9, "1": 2}'}}}

Current State: ACTIVE
"""


def test_the_innermost_error_of_python():
    found = failure_from_spark(Exception(OF_PYTHON))
    assert (found.error_class, found.message) == ("KeyError", "'amount'")
    assert 'raise KeyError("amount")' in found.stack
    assert "worker.py" not in found.stack
    assert "BasePythonRunner" not in found.stack


def test_what_we_tell_without_a_traceback():
    found = failure_from_spark(Exception(TOLD_PLAINLY % "spark.sink.records.WrongRow: a row has no topic"))
    assert (found.error_class, found.message) == (
        "penstock.spark.sink.records.WrongRow",
        "a row has no topic",
    )


def test_others_by_their_first_line():
    found = failure_from_spark(ValueError("\n[CAST_INVALID_INPUT] no number\n== SQL =="))
    assert (found.error_class, found.message) == ("ValueError", "[CAST_INVALID_INPUT] no number")


@pytest.mark.parametrize(
    ("error", "is_theirs"),
    [
        (Exception("[USER_RAISED_EXCEPTION] poison"), True),
        (Unavailable("nobody answers"), False),
        (Exception("An error occurred while calling o1.save.\n: java.lang.InterruptedException"), False),
        (Exception("[SPARK_JOB_CANCELLED] Job 5 cancelled"), False),
        (Exception(TOLD_PLAINLY % "client.errors.Unavailable: nobody answers"), False),
        (
            Exception(OF_PYTHON.replace("KeyError: 'amount'", "ModuleNotFoundError: No module named 'x'")),
            False,
        ),
        (Exception(TOLD_PLAINLY % "client.errors.Refused: t[0]: topic authorization failed"), False),
        (Exception(TOLD_PLAINLY % "client.errors.RecordsRefused: t[0]: message too large"), True),
        (Exception(TOLD_PLAINLY % "spark.sink.records.WrongRow: a row has no topic"), True),
        (Exception(TOLD_PLAINLY % "spark.sink.records.RecordTooLarge: a record of 9 bytes"), True),
        (Exception(OF_PYTHON.replace("KeyError: 'am", "penstock.client.errors.Unavailable: 'am")), False),
    ],
)
def test_whether_rows_may_be_the_reason(error, is_theirs):
    assert is_caused_by_rows(error) is is_theirs


def test_the_offsets_of_the_batch_that_failed():
    assert failed_range(Exception(ENDED)) == "t[0] 5 to 8"
    assert failed_range(Exception("boom")) is None


def test_a_missing_module_is_final_and_says_what_to_install():
    told = OF_PYTHON.replace("KeyError: 'amount'", "ModuleNotFoundError: No module named 'pandas'")
    found = error_info(Exception(told))
    assert found.message.startswith(
        "No module named 'pandas' (install it wherever tasks of this pipeline run"
    )
    assert is_permanent(found)
