"""What a transform returns, as records for a topic; and what it is given to see."""

from __future__ import annotations

from typing import Any, Final

from penstock.spark.pipelines.declaration import Pipeline, PipelineError, TopicSink
from penstock.spark.pipelines.evaluation import ATTEMPTS, FATE, GOOD, INTERNAL, LETTER, RECORD
from penstock.spark.schemas import TYPES

#: What becomes the time of records: null is when they are written.
TIMESTAMP: Final = "timestamp"
_HEADERS: Final = TYPES["headers"]
_PLACES: Final = ("key", "headers", "topic", "partition")
_TEXT: Final = ("string", "binary")
#: Times with all that they have, so that they are the same when they are read again.
JSON_FORMAT: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def as_evaluated(frame: Any) -> Any:
    """Rows of the source, where nothing is to be parsed: all of them are good."""
    from pyspark.sql import functions as f

    record = f.struct(*[f.col(name) for name in TYPES]).alias(RECORD)
    return frame.select(
        record,
        f.lit(1).alias(ATTEMPTS),
        f.lit(None).cast(_letter_type()).alias(LETTER),
        f.lit(GOOD).cast("tinyint").alias(FATE),
    )


def _letter_type() -> str:
    return f"struct<topic: string, partition: int, headers: {_HEADERS}, timestamp: timestamp>"


def good_rows(pipeline: Pipeline, evaluated: Any) -> Any:
    """What the transform sees."""
    from pyspark.sql import functions as f

    good = evaluated.where(f.col(FATE) == GOOD)
    return good.drop(*INTERNAL) if pipeline.evaluates else good.select(f"{RECORD}.*")


def letters(evaluated: Any) -> Any:
    """Rows that failed, as records for their topics."""
    from pyspark.sql import functions as f

    return evaluated.where(f.col(LETTER).isNotNull()).select(
        f.col(f"{LETTER}.topic").alias("topic"),
        f.col(f"{LETTER}.partition").alias("partition"),
        f.col(f"{RECORD}.key").alias("key"),
        f.col(f"{RECORD}.value").alias("value"),
        f.col(f"{LETTER}.headers").alias("headers"),
        f.col(f"{LETTER}.timestamp").alias(TIMESTAMP),
    )


def records(pipeline: Pipeline, output: Any, sink: TopicSink) -> Any:
    """The same columns as `letters` has. Raises PipelineError where a column is of a type that cannot be written."""
    from pyspark.sql import functions as f

    kinds = {field.name.lower(): field for field in output.schema.fields}
    whole = None if "value" in kinds or RECORD not in kinds else RECORD
    _refuse(pipeline, kinds, "value", _TEXT)
    _refuse(pipeline, kinds, "key", _TEXT)
    _refuse(pipeline, kinds, "headers", (_HEADERS,))
    _refuse(pipeline, kinds, "partition", ("int",))
    _refuse(pipeline, kinds, "topic", ("string",))
    if sink.topic is None and "topic" not in kinds:
        raise PipelineError(
            f"pipeline {pipeline.name}: nothing says where to write; name a topic, or add a column topic"
        )
    topic = f.lit(sink.topic) if sink.topic is not None else f.col("topic")
    return output.select(
        topic.cast("string").alias("topic"),
        _column(kinds, "partition", None).cast("int").alias("partition"),
        _column(kinds, "key", whole).cast("binary").alias("key"),
        _value(output, kinds).cast("binary").alias("value"),
        _column(kinds, "headers", whole).cast(_HEADERS).alias("headers"),
        f.lit(None).cast("timestamp").alias(TIMESTAMP),
    )


def _refuse(pipeline: Pipeline, kinds: dict[str, Any], name: str, wanted: tuple[str, ...]) -> None:
    if name not in kinds:
        return
    kind = kinds[name].dataType.simpleString().split(" collate ")[0]
    if kind not in wanted:
        raise PipelineError(
            f"pipeline {pipeline.name}: column {name} is {kind}; it must be {' or '.join(wanted)} to be written"
        )


def _column(kinds: dict[str, Any], name: str, whole: str | None) -> Any:
    from pyspark.sql import functions as f

    if name in kinds:
        return f.col(f"`{kinds[name].name}`")
    return f.lit(None) if whole is None else f.col(f"{whole}.{name}")


def _value(output: Any, kinds: dict[str, Any]) -> Any:
    """The column of that name, or all columns as JSON."""
    from pyspark.sql import functions as f

    if "value" in kinds:
        return f.col(f"`{kinds['value'].name}`")
    names = [name for name in output.columns if name.lower() not in (*_PLACES, RECORD)]
    if not names:
        return f.lit("{}")
    return f.to_json(f.struct(*[f.col(f"`{name}`") for name in names]), JSON_FORMAT)
