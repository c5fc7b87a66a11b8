"""`format("penstock")`: topics as sources and sinks. Spark imports this often, so each method imports what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from penstock.spark.plainly import end_with_reader, is_planner, told_plainly

if is_planner():
    end_with_reader()

if TYPE_CHECKING:
    from penstock.spark.batch_source import BatchReader
    from penstock.spark.sink import BatchWriter, StreamWriter
    from penstock.spark.stream_source import StreamReader


class PenstockDataSource(DataSource):  # type: ignore[misc, unused-ignore]
    """Options and columns have the names of Spark's own Kafka connector."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    @told_plainly()
    def schema(self) -> str:
        """The columns of a topic. A schema that the user gives is a choice among them, and read faster."""
        from penstock.spark.option_values import GivenOptions
        from penstock.spark.schemas import table_schema

        return table_schema(include_headers=GivenOptions(self.options).flag("includeHeaders", default=False))

    @told_plainly()
    def reader(self, schema: Any) -> BatchReader:
        from penstock.spark.batch_source import BatchReader
        from penstock.spark.options import SourceOptions
        from penstock.spark.schemas import Projection

        return BatchReader(SourceOptions.parse(self.options, streaming=False), Projection.of(schema))

    @told_plainly()
    def streamReader(self, schema: Any) -> StreamReader:
        from penstock.spark.options import SourceOptions
        from penstock.spark.schemas import Projection
        from penstock.spark.stream_source import StreamReader

        return StreamReader(SourceOptions.parse(self.options, streaming=True), Projection.of(schema))

    @told_plainly()
    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        from penstock.spark.sink import BatchWriter, refuse_overwrite
        from penstock.spark.sink_options import SinkOptions
        from penstock.spark.sink_rows import SinkColumns

        refuse_overwrite(overwrite)
        options = SinkOptions.parse(self.options, streaming=False)
        return BatchWriter(options, SinkColumns.of(schema, options.topic, options.timestamp_column))

    @told_plainly()
    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        from penstock.spark.sink import StreamWriter, refuse_overwrite
        from penstock.spark.sink_options import SinkOptions
        from penstock.spark.sink_rows import SinkColumns

        refuse_overwrite(overwrite)
        options = SinkOptions.parse(self.options, streaming=True)
        return StreamWriter(options, SinkColumns.of(schema, options.topic, options.timestamp_column))
