"""What a driver process does when it is asked: each operation is one job of Spark, timed where it runs.

All reads compute a hash of key and value of every row, so that no reader can skip the bytes, as with a count.
"""

import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from pyspark.sql.functions import to_date

from penstock.spark.session import local_checkpoints

#: Wraps around, which is why sessions are not ANSI here; equal for equal rows in any order.
CHECKSUM = ("count(*) AS rows", "sum(xxhash64(key, value)) AS hash")

Answer = dict[str, Any]
Options = Mapping[str, str]


def read(spark: Any, *, format: str, options: Options, schema: str | None = None) -> Answer:
    """Hash every row."""
    began = time.monotonic()
    (row,) = _table(spark, format, options, schema).selectExpr(*CHECKSUM).collect()
    return {"seconds": time.monotonic() - began, "rows": row["rows"], "hash": row["hash"]}


def count_tasks(spark: Any, *, format: str, options: Options, schema: str | None = None) -> Answer:
    return {"tasks": _table(spark, format, options, schema).rdd.getNumPartitions()}


def save_parquet(spark: Any, *, format: str, options: Options, path: str, codec: str) -> Answer:
    """The same rows as a table of files, one for each task that reads them here."""
    table = spark.read.format(format).options(**options).load()
    table.write.mode("overwrite").option("compression", codec).parquet(path)
    return {}


def write(spark: Any, *, path: str, format: str, options: Options) -> Answer:
    """The rows of a table of files, to wherever."""
    rows = spark.read.parquet(path).select("key", "value")
    began = time.monotonic()
    rows.write.format(format).mode("append").options(**options).save()
    return {"seconds": time.monotonic() - began}


def stream(
    spark: Any,
    *,
    source: str,
    source_options: Options,
    sink: str,
    sink_options: Options,
    checkpoint: str,
    without_processes: bool,
) -> Answer:
    """All that is there, in micro-batches of the size that the options say; what Spark tells about each."""
    rows = spark.readStream.format(source).options(**source_options).load().select("key", "value")
    writer = rows.writeStream.format(sink).options(**sink_options)
    with local_checkpoints(spark, checkpoint) if without_processes else nullcontext():
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    told = [_progress(each) for each in query.recentProgress]
    shutil.rmtree(checkpoint, ignore_errors=True)
    return {"batches": [each for each in told if each["rows"]]}


def archive(spark: Any, *, bootstrap: str, topic: str, name: str, folder: str) -> Answer:
    """A topic to a Delta table, exactly once, by the pipeline that users have; then the table is read."""
    from penstock.spark.archive import archive as declare
    from penstock.spark.archive import history
    from penstock.spark.pipelines.assembly import start
    from penstock.spark.pipelines.declaration import RunSettings

    run = RunSettings(bootstrap=bootstrap, checkpoint=f"{folder}/checkpoint", once=True)
    table = f"{folder}/table"
    began = time.monotonic()
    for query in start(spark, declare(topic, table, name=name), run):
        query.awaitTermination()
    seconds = time.monotonic() - began
    rows = history(spark, table).withColumnRenamed("_key", "key")
    return _checked(rows, seconds, folder)


def archive_files(spark: Any, *, source: str, options: Options, folder: str) -> Answer:
    """A topic to a folder of Parquet files by day: what Spark has for it without a table format."""
    path = f"{folder}/files"
    rows = spark.readStream.format(source).options(**options).load().withColumn("day", to_date("timestamp"))
    began = time.monotonic()
    writer = rows.writeStream.format("parquet").partitionBy("day").option("path", path)
    checkpoint = f"{folder}/checkpoint"
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    return _checked(spark.read.parquet(path), time.monotonic() - began, folder)


def collect_garbage(spark: Any) -> Answer:
    """What one left behind is not for the next to clear away."""
    spark._jvm.java.lang.System.gc()
    return {}


OPERATIONS = {
    each.__name__: each
    for each in (
        read,
        count_tasks,
        save_parquet,
        write,
        stream,
        archive,
        archive_files,
        collect_garbage,
    )
}


def _table(spark: Any, format: str, options: Options, schema: str | None) -> Any:
    reader = spark.read.format(format).options(**options)
    return (reader.schema(schema) if schema is not None else reader).load()


def _checked(rows: Any, seconds: float, folder: str) -> Answer:
    (row,) = rows.selectExpr(*CHECKSUM).collect()
    shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": seconds, "rows": row["rows"], "hash": row["hash"]}


def _progress(told: Any) -> Answer:
    return {"rows": told["numInputRows"], "ms": dict(told["durationMs"])}
