"""The pipeline that archives a topic."""

from __future__ import annotations

from pathlib import Path

from penstock.spark.archive.columns import archived_rows
from penstock.spark.archive.readings import JSON, reading
from penstock.spark.archive.sink import DeltaSink
from penstock.spark.pipelines.declaration import Errors, Pipeline, PipelineError, Source, pipeline


def archive(
    topic: str,
    table: str,
    *,
    schema: str | Path | None = None,
    format: str = JSON,
    name: str | None = None,
    every: str | None = "10s",
    starting: str = "earliest",
    compact_mb: int | str = 128,
    keep_hours: int | str = 24,
    offsets_max: int | str = 10_000_000,
    **storage: str,
) -> Pipeline:
    """Every record of a topic once in a Delta table, partitioned by day, with small files joined as it goes.

    topic: what is archived; read what is committed only
    table: a folder or URI that driver and tasks reach under the same name
    schema: a file with the columns of values (DDL, JSON Schema, Avro); values that do not fit are dead letters.
        Without it values stay as they are, in a column `value`
    format: of values, where there is a schema: json, avro, or avro-framed with a registry's five bytes
    every: how often; every batch makes a commit and at least one file
    compact_mb: the size that files are joined to
    keep_hours: how long files that were replaced are kept for those who still read them
    offsets_max: how much a batch takes at once
    Other settings go to the store of the table: access keys and the like, by the names of `deltalake`.
    """
    values = None if schema is None else reading(schema, format)
    sink = DeltaSink(
        table,
        topic=topic,
        reading=None if values is None else values.to_json(),
        compact_mb=_number("compact_mb", compact_mb, least=1),
        keep_hours=_number("keep_hours", keep_hours, least=1),
        storage=storage,
    )
    options = {"maxOffsetsPerTrigger": str(_number("offsets_max", offsets_max, least=1))}
    declared = pipeline(
        name or f"archive-{topic}",
        source=Source(topics=(topic,), starting=starting, options=options),
        sink=sink,
        delivery="exactly-once",
        every=every,
        parse=values,
        # There is no row function: what does not fit now does not fit later.
        errors=Errors(attempts=1),
    )
    return declared(archived_rows)


def _number(name: str, value: int | str, *, least: int) -> int:
    text = str(value).strip()
    if not text.isdecimal() or int(text) < least:
        raise PipelineError(f"{name}={value} must be a whole number of at least {least}")
    return int(text)
