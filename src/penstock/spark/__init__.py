"""Topics as Spark sources, sinks and tables, and the pipelines that run on them. Needs the `spark` extra."""

from typing import Any


def register(spark: Any) -> None:
    """Make `format("penstock")` known to this session, where Spark has not found it by itself."""
    from penstock.spark.datasource import PenstockDataSource

    spark.dataSource.register(PenstockDataSource)
