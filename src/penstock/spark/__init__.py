"""Topics as Spark sources, sinks and tables, and the pipelines that run on them. Needs the `spark` extra.

Import this package before you create the first session: it makes Spark run its Python workers with this interpreter,
unless PYSPARK_PYTHON is set. Spark's default is `python3`, which has no Penstock if the environment is not activated.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.pipelines.declaration import Backoff as Backoff
    from penstock.spark.pipelines.declaration import BatchSink as BatchSink
    from penstock.spark.pipelines.declaration import DeadLetter as DeadLetter
    from penstock.spark.pipelines.declaration import Errors as Errors
    from penstock.spark.pipelines.declaration import Pipeline as Pipeline
    from penstock.spark.pipelines.declaration import Source as Source
    from penstock.spark.pipelines.declaration import TopicSink as TopicSink
    from penstock.spark.pipelines.declaration import pipeline as pipeline
    from penstock.spark.pipelines.declaration import row_function as row_function
    from penstock.spark.pipelines.parsers import avro_rows as avro_rows
    from penstock.spark.pipelines.parsers import json_rows as json_rows

_DECLARATION: Final = "penstock.spark.pipelines.declaration"
_PARSING: Final = "penstock.spark.pipelines.parsers"
#: The interpreter that Spark runs workers with by default.
_SPARK_DEFAULT_PYTHON: Final = "python3"
#: Public name -> module that defines it. Each module is imported when the name is first used.
_EXPORTS: Final = {
    "Backoff": _DECLARATION,
    "BatchSink": _DECLARATION,
    "DeadLetter": _DECLARATION,
    "Errors": _DECLARATION,
    "Pipeline": _DECLARATION,
    "Source": _DECLARATION,
    "TopicSink": _DECLARATION,
    "avro_rows": _PARSING,
    "json_rows": _PARSING,
    "pipeline": _DECLARATION,
    "row_function": _DECLARATION,
}

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def register(spark: Any) -> None:
    """Register `format("penstock")` with this session, in case Spark has not discovered it by itself.

    Also makes this the active session of the current thread, because Spark looks up sources in the active session, and
    lets Spark leave private keys among the options out of its UI.
    """
    # Importing this package imports neither pyspark nor the data source: the command line and `Pipeline` need neither.
    from penstock.spark.datasource import PenstockDataSource
    from penstock.spark.session import REDACTION, REDACTION_SETTING, SPARK_REDACTION

    _use_this_interpreter(spark)
    if spark.conf.get(REDACTION_SETTING, SPARK_REDACTION) == SPARK_REDACTION:
        spark.conf.set(REDACTION_SETTING, REDACTION)
    spark.dataSource.register(PenstockDataSource)
    spark.createDataFrame([], "nothing INT")


def _use_this_interpreter(spark: Any) -> None:
    """Run workers with the driver's interpreter if both share a machine.

    Needed if the session was created before this package was imported.
    """
    # A Spark Connect session has no context here: its workers run on the server.
    context = None if ".connect." in type(spark).__module__ else spark.sparkContext
    if (
        context is not None
        and context.pythonExec == _SPARK_DEFAULT_PYTHON
        and context.master.startswith("local")
    ):
        context.pythonExec = os.environ["PYSPARK_PYTHON"]
