"""The files of an archive as a DataFrame, as they were at one version, read by Spark itself.

Files are named one by one, so what is committed later does not show, and a filter on the day reads only the files of
that day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from penstock.spark.archive.errors import ArchiveError
from penstock.spark.archive.location import Location
from penstock.spark.archive.tables import Table

#: What readers of files need not know of.
_HARMLESS: Final = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
_MAPPING: Final = "delta.columnMapping.mode"


def history(
    spark: Any, table: str, *, version: int | None = None, storage: Mapping[str, str] | None = None
) -> Any:
    """All rows of the table, at its last version or at that one. Raises ArchiveError."""
    return rows_of(spark, opened(Location.of(table, storage), version))


def opened(location: Location, version: int | None = None) -> Table:
    """Raises ArchiveError where there is none, or none that can be read by its files."""
    table = Table.open(location, version)
    if table is None:
        raise ArchiveError(f"there is no table {location}")
    _refuse_features(table)
    return table


def _refuse_features(table: Table) -> None:
    protocol = table.handle.protocol()
    features = sorted(set(protocol.reader_features or ()) - _HARMLESS)
    if table.properties.get(_MAPPING, "none") != "none" and "columnMapping" not in features:
        features.append("columnMapping")
    if not features and protocol.min_reader_version == 2:
        features.append("columnMapping")
    if features:
        raise ArchiveError(
            f"table {table.location} uses {', '.join(features)}: its files alone do not say what its rows are; "
            "read it with a reader of Delta, or rewrite it without that"
        )


def rows_of(spark: Any, table: Table) -> Any:
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(json.loads(table.schema))
    paths = _paths(table)
    if not paths:
        return spark.createDataFrame([], schema)
    reader = spark.read.schema(schema).option("basePath", table.location.for_spark())
    return reader.parquet(*paths).select(*[f"`{name}`" for name in schema.names])


def _paths(table: Table) -> list[str]:
    """Of folders that are named by their value, as every writer of ours names them. Raises ArchiveError."""
    partition_by = table.partition_by
    found = [unquote(path) for path in table.paths()]
    for name in partition_by:
        strangers = [path for path in found if f"{name}=" not in path]
        if strangers:
            raise ArchiveError(
                f"table {table.location} has files that are not in a folder of their {name}, such as {strangers[0]}"
            )
    return [table.location.for_spark(path) for path in found]
