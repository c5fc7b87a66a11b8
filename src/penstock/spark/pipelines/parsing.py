"""From values of records to columns, by a schema: JSON and Avro. What does not fit is refused with a sentence why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines import schema_files
from penstock.spark.pipelines.declaration import Parsed, PipelineError

if TYPE_CHECKING:
    import pyarrow as pa

_FILES: Final = (".json", ".avsc", ".ddl", ".sql", ".txt")


def json_rows(schema: str | Path) -> JsonRows:
    """Values are JSON objects. The schema is DDL ("id STRING NOT NULL, amount DOUBLE"), or a file with DDL, JSON Schema
    or Spark's own JSON; what is NOT NULL must be there. Raises PipelineError.
    """
    text = _text(schema)
    if text.lstrip().startswith("{"):
        text = schema_files.from_json(_document(text, schema), str(schema))
    return JsonRows(schema=text)


def avro_rows(schema: str | Path, *, framed: bool = False) -> AvroRows:
    """Values are Avro, as a schema file (.avsc) says; `framed` with five bytes before, as schema registries want it.

    Raises PipelineError.
    """
    text = _text(schema)
    document = _document(text, schema)
    return AvroRows(
        schema=schema_files.from_avro(document, str(schema)), avro=json.dumps(document), framed=framed
    )


def _text(schema: str | Path) -> str:
    """What a file of this name holds, or the schema itself."""
    is_file = isinstance(schema, Path) or (
        isinstance(schema, str) and schema.strip().lower().endswith(_FILES) and "\n" not in schema
    )
    try:
        text = Path(str(schema).strip()).read_text() if is_file else str(schema)
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"the schema {schema} cannot be read: {error}") from None
    if not text.strip():
        raise PipelineError(f"the schema {schema} is empty")
    return text


def _document(text: str, schema: str | Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        name = f"the schema {schema}" if len(str(schema)) < 200 else "the schema"
        raise PipelineError(f"{name} is no JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRows:
    schema: str

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        from penstock.spark.pipelines.parsing_json import JsonReader

        return JsonReader(schema).parse


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroRows:
    schema: str
    avro: str
    framed: bool

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        from penstock.spark.pipelines.parsing_avro import AvroReader

        return AvroReader(self.avro, schema, framed=self.framed).parse


# What all parsers share


def struct_type(text: str, what: str) -> Any:
    """DDL, or JSON of Spark, as a StructType; needs a session. Raises PipelineError."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        if text.lstrip().startswith("{"):
            return StructType.fromJson(json.loads(text))
        found = StructType.fromDDL(text)
    except (PySparkException, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PipelineError(f"{what}: {text!r} are no columns ({reason})") from None
    if not isinstance(found, StructType):
        raise PipelineError(f"{what}: {text!r} are no columns")
    return found


def arrow_struct(schema: Any) -> pa.StructType:
    """The columns as one Arrow type, in which every field may be null: rows that failed are."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    return pa.struct([field.with_nullable(True) for field in to_arrow_schema(schema, timezone="UTC")])


def parse_each(values: Any, kind: pa.StructType, parse: Callable[[bytes | None], dict[str, Any]]) -> Parsed:
    """One by one. `parse` raises RowError."""
    rows: list[dict[str, Any] | None] = []
    errors: dict[int, str] = {}
    for number, value in enumerate(values.to_pylist()):
        try:
            rows.append(parse(value))
        except RowError as error:
            rows.append(None)
            errors[number] = str(error)
    return to_struct(rows, kind, errors)


def to_struct(rows: list[dict[str, Any] | None], kind: pa.StructType, errors: dict[int, str]) -> Parsed:
    """Dicts as Arrow. What does not fit is an error of its row."""
    import pyarrow as pa

    try:
        return Parsed(_columns(rows, kind), errors)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        for number, row in enumerate(rows):
            flaw = None if row is None else _flaw(row, kind)
            if flaw is not None:
                rows[number], errors[number] = None, flaw
        return Parsed(_columns(rows, kind), errors)


def _columns(rows: list[dict[str, Any] | None], kind: pa.StructType) -> pa.StructArray:
    """Column by column, which is much faster than row by row."""
    import pyarrow as pa

    is_null = pa.array([row is None for row in rows], pa.bool_())
    getters = [({} if row is None else row).get for row in rows]
    columns = [pa.array([get(field.name) for get in getters], type=field.type) for field in kind]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=is_null)


def _flaw(row: dict[str, Any], kind: pa.StructType) -> str | None:
    import pyarrow as pa

    for field in kind:
        value = row.get(field.name)
        try:
            pa.array([value], type=field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            return f"{field.name} must be {field.type}, and is {shown(value)} ({error})"
    return None


class RowError(Exception):
    """A row is refused; the sentence names the field."""


def shown(value: object) -> str:
    """For sentences: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
