"""The columns of a topic: names and types of Spark's own Kafka connector, as Spark hands them to Arrow."""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

HEADER: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
#: Spark names the items of an array "element".
HEADERS: Final = pa.list_(pa.field("element", HEADER))

SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
COLUMNS: Final[tuple[str, ...]] = tuple(SCHEMA.names)
#: What Spark's connector gives unless `includeHeaders` is set.
COLUMNS_WITHOUT_HEADERS: Final = COLUMNS[:-1]


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """The schema of these columns, in this order. Raises ValueError for a name that a topic has no column for."""
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not columns:
        named = f"no column {', '.join(unknown)}" if unknown else "no table without columns"
        raise ValueError(f"A topic has {named}; its columns are {', '.join(COLUMNS)}.")
    return pa.schema([SCHEMA.field(name) for name in columns])
