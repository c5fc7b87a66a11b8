"""The columns of an archive: what a value holds, and beside it which record it was.

`_key`, `_headers`, `_timestamp`, `_partition` and `_offset` are those of the record; `_tombstone` says that it had no
value; `day` (of the timestamp, in UTC) is what the table is partitioned by.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN
from penstock.spark.pipelines.declaration import PipelineError

DAY: Final = "day"
TOMBSTONE: Final = "_tombstone"
KEY: Final = "_key"
TIMESTAMP: Final = "_timestamp"
VALUE: Final = "value"
RECORD: Final = "_record"
#: Column -> that of the source.
_OF_RECORD: Final = {
    KEY: "key",
    "_headers": "headers",
    TIMESTAMP: "timestamp",
    PARTITION_COLUMN: "partition",
    OFFSET_COLUMN: "offset",
}
OURS: Final = (*_OF_RECORD, TOMBSTONE, DAY)
_DAY_MICROSECONDS: Final = 86_400_000_000
#: From year 1 to year 9999: timestamps can lie, and not every reader has other days.
_DAYS: Final = (-719_162, 2_932_896)


def archived_rows(frame: Any) -> Any:
    """Of rows as a pipeline gives them: parsed columns and `_record`, or those of the source. Raises PipelineError."""
    if RECORD in frame.columns:
        parsed = [name for name in frame.columns if name != RECORD]
        _refuse_ours(parsed)
        return _with_record(frame, parsed, f"{RECORD}.")
    return _with_record(frame, [VALUE], "")


def _with_record(frame: Any, kept: list[str], prefix: str) -> Any:
    from pyspark.sql import functions as F

    record = [F.col(prefix + name).alias(ours) for ours, name in _OF_RECORD.items()]
    return frame.select(
        *[F.col(f"`{name}`") for name in kept],
        *record,
        F.col(prefix + VALUE).isNull().alias(TOMBSTONE),
        day_of(prefix + "timestamp").alias(DAY),
    )


def day_of(timestamp: str) -> Any:
    """The day in UTC, whatever the time zone of the session is."""
    from pyspark.sql import functions as F

    micros, day = f"unix_micros({timestamp})", f"{_DAY_MICROSECONDS}L"
    # Whole numbers only, and rounded down before 1970 too.
    days = F.expr(f"cast(({micros} - pmod({micros}, {day})) div {day} as int)")
    first, last = _DAYS
    return F.date_from_unix_date(F.greatest(F.lit(first), F.least(F.lit(last), days)))


def _refuse_ours(parsed: list[str]) -> None:
    taken = [name for name in parsed if name.lower() in OURS]
    if taken:
        raise PipelineError(
            f"the schema has columns that an archive has for itself: {', '.join(taken)} "
            f"(these are {', '.join(OURS)})"
        )
