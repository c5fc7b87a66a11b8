"""Topics as Spark sources, sinks and tables, and the pipelines that run on them. Needs the `spark` extra."""

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


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def register(spark: Any) -> None:
    """Make `format("penstock")` known to this session, where Spark has not found it by itself.

    Sources are looked up in the session that is active in a thread, which this one becomes here.
    """
    from penstock.spark.datasource import PenstockDataSource

    spark.dataSource.register(PenstockDataSource)
    spark.createDataFrame([], "nothing INT")
