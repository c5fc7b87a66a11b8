"""Topics as Spark sources, sinks and tables, and the pipelines that run on them. Needs the `spark` extra.

Importing it before the first session makes Spark run its Python workers with this interpreter, unless PYSPARK_PYTHON
says otherwise: the `python3` of an environment that is not activated knows nothing of Penstock.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.client.retrying import Backoff as Backoff
    from penstock.spark.pipelines.declaration import BatchSink as BatchSink
    from penstock.spark.pipelines.declaration import DeadLetter as DeadLetter
    from penstock.spark.pipelines.declaration import Errors as Errors
    from penstock.spark.pipelines.declaration import Pipeline as Pipeline
    from penstock.spark.pipelines.declaration import Source as Source
    from penstock.spark.pipelines.declaration import TopicSink as TopicSink
    from penstock.spark.pipelines.declaration import pipeline as pipeline
    from penstock.spark.pipelines.declaration import row_function as row_function
    from penstock.spark.pipelines.parsing import avro_rows as avro_rows
    from penstock.spark.pipelines.parsing import json_rows as json_rows

_DECLARATION: Final = "penstock.spark.pipelines.declaration"
_PARSING: Final = "penstock.spark.pipelines.parsing"
#: What Spark runs workers with where nothing is said.
_SPARKS_DEFAULT: Final = "python3"
#: Where the names are that users import from here; nothing is loaded before it is used.
_EXPORTS: Final = {
    "Backoff": "penstock.client.retrying",
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
    """Make `format("penstock")` known to this session, where Spark has not found it by itself.

    Sources are looked up in the session that is active in a thread, which this one becomes here.
    """
    from penstock.spark.datasource import PenstockDataSource

    _use_this_interpreter(spark)
    spark.dataSource.register(PenstockDataSource)
    spark.createDataFrame([], "nothing INT")


def _use_this_interpreter(spark: Any) -> None:
    """Where driver and workers share a machine, and the session was made before this package was imported."""
    context = None if _is_connected(spark) else spark.sparkContext
    if context is not None and context.pythonExec == _SPARKS_DEFAULT and context.master.startswith("local"):
        context.pythonExec = os.environ["PYSPARK_PYTHON"]


def _is_connected(spark: Any) -> bool:
    """Sessions of Spark Connect have their workers on the server."""
    return ".connect." in type(spark).__module__
