"""A driver process: one Spark session, which does what lines of JSON on its standard input ask for."""

import json
import os
import sys
from typing import Any, TextIO

from benchmarks.spark.operations import OPERATIONS


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = _take_standard_output()
    from penstock.spark import register
    from penstock.spark.session import session

    spark = session("penstock-bench", master=settings["master"], settings=settings["spark"])
    register(spark)
    spark.sparkContext.setLogLevel("ERROR")
    _say(answers, {"spark": spark.version})
    for line in sys.stdin:
        _say(answers, _answer(spark, json.loads(line)))
    spark.stop()


def _answer(spark: Any, asked: dict[str, Any]) -> dict[str, Any]:
    operation = OPERATIONS[asked.pop("operation")]
    try:
        return operation(spark, **asked)
    except Exception as error:  # whatever Spark raises is for the one who asked
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}"}


def _take_standard_output() -> TextIO:
    """For answers alone: what Spark and its Java print goes where errors go."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
