"""Rows for tables without Spark: the input of tasks, and a frame that runs tasks in this process."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.archive.delta_table import ArchiveTable
from penstock.spark.archive.files import TableLocation
from penstock.spark.offsets import Position

DAY_US = 86_400_000_000
FIRST_DAY = 20_000  # 2024-10-04

SCHEMA = StructType(
    [
        StructField("value", StringType()),
        StructField("_partition", IntegerType()),
        StructField("_offset", LongType()),
        StructField("_timestamp", TimestampType()),
        StructField("day", DateType()),
    ]
)


def record_batch(partition: int, offsets: Iterable[int], days: Iterable[int] | None = None) -> pa.RecordBatch:
    """Records of one partition, of the first day or of the day that `days` gives."""
    numbers = list(offsets)
    dates = list(days) if days is not None else [FIRST_DAY] * len(numbers)
    return pa.record_batch(
        {
            "value": [f"{partition}-{offset}" for offset in numbers],
            "_partition": pa.array([partition] * len(numbers), pa.int32()),
            "_offset": pa.array(numbers, pa.int64()),
            "_timestamp": pa.array([day * DAY_US for day in dates], pa.timestamp("us", "UTC")),
            "day": pa.array(dates, pa.int32()).cast(pa.date32()),
        }
    )


class Settings(dict[str, str]):
    """As much of a session as the sink needs."""

    def get(self, name: str, default: Any = "") -> str:
        return super().get(name, default)

    def set(self, name: str, value: str) -> None:
        self[name] = value


@dataclass
class Frame:
    """As much of a DataFrame as the sink needs. Each list of batches is the input of a task."""

    tasks: list[list[pa.RecordBatch]]
    schema: StructType = SCHEMA
    sparkSession: Any = field(default_factory=lambda: SimpleNamespace(conf=Settings()))

    def mapInArrow(self, function: Any, schema: str) -> Any:
        def collect() -> Iterator[dict[str, str]]:
            for task in self.tasks:
                for result in function(iter(task)):
                    yield from result.to_pylist()

        return SimpleNamespace(collect=collect)


def rows_in(path: Path) -> list[tuple[int, int]]:
    """Return partition and offset of all rows, sorted, including duplicates."""
    table = ArchiveTable.open(TableLocation.of(str(path)))
    if table is None:
        return []
    found = table.handle.to_pyarrow_table(columns=["_partition", "_offset"]).to_pydict()
    return sorted(zip(found["_partition"], found["_offset"], strict=True))


def note_offsets(checkpoint: Path, number: int, position: Position) -> None:
    """Write the offsets file, as Spark does before a batch starts."""
    folder = checkpoint / "offsets"
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(position.to_json())
    (folder / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{content}')
