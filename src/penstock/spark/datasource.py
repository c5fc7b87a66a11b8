"""The data source `format("penstock")`: topics as sources and sinks.

Spark imports this module often, so each method imports only what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from penstock.spark.workers import exit_on_sigpipe, is_planning_worker, without_traceback

if is_planning_worker():
    exit_on_sigpipe()

if TYPE_CHECKING:
    from penstock.spark.sink.writers import BatchWriter, StreamWriter
    from penstock.spark.source.batch import BatchReader
    from penstock.spark.source.stream import StreamReader


class PenstockDataSource(DataSource):  # type: ignore[misc, unused-ignore]
    """The data source. Options and columns have the names of Spark's own Kafka connector."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    @without_traceback()
    def schema(self) -> str:
        """Return the columns of a topic. A schema that the user gives selects among them; reading fewer is faster."""
        from penstock.spark.option_reader import OptionReader
        from penstock.spark.schema import table_schema

        return table_schema(include_headers=OptionReader(self.options).flag("includeHeaders", default=False))

    @without_traceback()
    def reader(self, schema: Any) -> BatchReader:
        from penstock.spark.schema import Projection
        from penstock.spark.source.batch import BatchReader
        from penstock.spark.source.options import SourceOptions

        return BatchReader(SourceOptions.parse(self.options, streaming=False), Projection.of(schema))

    @without_traceback()
    def streamReader(self, schema: Any) -> StreamReader:
        from penstock.spark.schema import Projection
        from penstock.spark.source.options import SourceOptions
        from penstock.spark.source.stream import StreamReader

        return StreamReader(SourceOptions.parse(self.options, streaming=True), Projection.of(schema))

    @without_traceback()
    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        from penstock.spark.sink.options import SinkOptions
        from penstock.spark.sink.records import SinkColumns
        from penstock.spark.sink.writers import BatchWriter, refuse_overwrite

        refuse_overwrite(overwrite)
        options = SinkOptions.parse(self.options, streaming=False)
        return BatchWriter(options, SinkColumns.of(schema, options.topic, options.timestamp_column))

    @without_traceback()
    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        from penstock.spark.sink.options import SinkOptions
        from penstock.spark.sink.records import SinkColumns
        from penstock.spark.sink.writers import StreamWriter, refuse_overwrite

        refuse_overwrite(overwrite)
        options = SinkOptions.parse(self.options, streaming=True)
        return StreamWriter(options, SinkColumns.of(schema, options.topic, options.timestamp_column))
