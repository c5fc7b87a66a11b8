"""From values of records to columns, by a schema: JSON and Avro. What does not fit is refused with a sentence why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.spark.pipelines import schema_files
from penstock.spark.pipelines.declaration import Parsed, PipelineError

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
