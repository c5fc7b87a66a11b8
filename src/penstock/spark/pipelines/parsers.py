"""Parses the values of records into columns, by a schema: JSON and Avro.

A value that does not fit is refused with a message that says why. JSON Schema and Avro schemas are converted to Spark's
columns; a type that has no column type is refused by name. Avro values are read one by one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.arrow_values import RowError, arrow_struct, parse_each
from penstock.spark.pipelines.declaration import Parsed, PipelineError

if TYPE_CHECKING:
    import pyarrow as pa


_Type = str | dict[str, Any]

_JSON_SCALARS: Final = {"string": "string", "integer": "long", "number": "double", "boolean": "boolean"}
_JSON_FORMATS: Final = {"date-time": "timestamp", "date": "date"}
_AVRO_SCALARS: Final = {
    "string": "string",
    "int": "integer",
    "long": "long",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "bytes": "binary",
    "enum": "string",
    "fixed": "binary",
}
_AVRO_LOGICAL: Final = {
    "date": "date",
    "timestamp-millis": "timestamp",
    "timestamp-micros": "timestamp",
    "local-timestamp-millis": "timestamp_ntz",
    "local-timestamp-micros": "timestamp_ntz",
    "uuid": "string",
}


def columns_of_json_schema(document: Any, name: str) -> str:
    """Convert a JSON Schema to Spark's JSON schema, which is also accepted as it is. Raises PipelineError."""
    if isinstance(document, dict) and document.get("type") == "struct":
        return json.dumps(document)
    if not isinstance(document, dict) or "properties" not in document:
        raise PipelineError(f"the schema {name} does not describe an object with properties")
    return json.dumps(_json_object(document, name, ""))


def _json_object(document: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    required = set(document.get("required", ()))
    fields = [
        _struct_field(field, *_json_type(kind, name, f"{path}{field}"), required=field in required)
        for field, kind in document["properties"].items()
    ]
    return {"type": "struct", "fields": fields}


def _json_type(kind: Any, name: str, path: str) -> tuple[_Type, bool]:
    """Return the column type, and whether null is allowed."""
    if not isinstance(kind, dict):
        raise _unsupported_type(name, path, kind)
    named = kind.get("type")
    names = named if isinstance(named, list) else [named]
    may_be_null = "null" in names
    rest = [each for each in names if each != "null"]
    if len(rest) != 1:
        raise _unsupported_type(name, path, named)
    match rest[0]:
        case "object" if "properties" in kind:
            return _json_object(kind, name, f"{path}."), may_be_null
        case "object" if isinstance(kind.get("additionalProperties"), dict):
            value, value_null = _json_type(kind["additionalProperties"], name, f"{path}.*")
            return _map_type(value, contains_null=value_null), may_be_null
        case "array" if isinstance(kind.get("items"), dict):
            element, element_null = _json_type(kind["items"], name, f"{path}[]")
            return _array_type(element, contains_null=element_null), may_be_null
        case "string":
            return _JSON_FORMATS.get(kind.get("format", ""), "string"), may_be_null
        case scalar if scalar in _JSON_SCALARS:
            return _JSON_SCALARS[scalar], may_be_null
    raise _unsupported_type(name, path, named)


def columns_of_avro_schema(document: Any, name: str) -> str:
    """Convert the schema of an Avro record to Spark's JSON schema. Raises PipelineError."""
    if not isinstance(document, dict) or document.get("type") != "record":
        raise PipelineError(f"the schema {name} does not describe an Avro record")
    known: dict[str, Any] = {}
    return json.dumps(_avro_record(document, name, "", known))


def _avro_record(document: dict[str, Any], name: str, path: str, known: dict[str, Any]) -> dict[str, Any]:
    # A type is known only after its fields are read, so a record that contains itself is refused.
    fields = []
    for field in document.get("fields", ()):
        kind, may_be_null = _avro_type(field["type"], name, f"{path}{field['name']}", known)
        fields.append(_struct_field(field["name"], kind, may_be_null, required=True))
    if not fields:
        # A value of no bytes is refused, because a list of them could be of any length without using memory.
        raise _unsupported_type(name, path.removesuffix(".") or "the record", document)
    known[_short_name(str(document.get("name", "")))] = document
    return {"type": "struct", "fields": fields}


def _short_name(name: str) -> str:
    """Return the name without its namespace: a type may be used again with the namespace or without."""
    return name.rpartition(".")[2]


def _avro_type(kind: Any, name: str, path: str, known: dict[str, Any]) -> tuple[_Type, bool]:
    if isinstance(kind, list):
        rest = [each for each in kind if each != "null"]
        if len(rest) != 1:
            raise _unsupported_type(name, path, kind)
        return _avro_type(rest[0], name, path, known)[0], len(rest) < len(kind)
    if isinstance(kind, str):
        if kind in _AVRO_SCALARS:
            return _AVRO_SCALARS[kind], False
        if _short_name(kind) not in known:
            raise _unsupported_type(name, path, kind)
        return _avro_type(known[_short_name(kind)], name, path, known)
    if not isinstance(kind, dict):
        raise _unsupported_type(name, path, kind)
    return _avro_complex(kind, name, path, known), False


def _avro_complex(kind: dict[str, Any], name: str, path: str, known: dict[str, Any]) -> _Type:
    logical = kind.get("logicalType")
    match kind.get("type"):
        case "record":
            return _avro_record(kind, name, f"{path}.", known)
        case "fixed" if not kind.get("size"):
            raise _unsupported_type(name, path, kind)
        case "array":
            element, element_null = _avro_type(kind["items"], name, f"{path}[]", known)
            return _array_type(element, contains_null=element_null)
        case "map":
            value, value_null = _avro_type(kind["values"], name, f"{path}.*", known)
            return _map_type(value, contains_null=value_null)
        case "bytes" | "fixed" if logical == "decimal":
            return f"decimal({kind['precision']},{kind.get('scale', 0)})"
        case "int" | "long" | "string" if logical in _AVRO_LOGICAL:
            return _AVRO_LOGICAL[logical]
        case str() as scalar if scalar in _AVRO_SCALARS:
            known[_short_name(str(kind.get("name", "")))] = kind
            return _AVRO_SCALARS[scalar]
    raise _unsupported_type(name, path, kind)


def _struct_field(name: str, kind: _Type, may_be_null: bool, *, required: bool) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": may_be_null or not required, "metadata": {}}


def _array_type(element: _Type, *, contains_null: bool) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": contains_null}


def _map_type(value: _Type, *, contains_null: bool) -> dict[str, Any]:
    return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": contains_null}


def _unsupported_type(name: str, path: str, kind: object) -> PipelineError:
    return PipelineError(
        f"the schema {name}: {path} has the type {json.dumps(kind)}, for which there is no column type"
    )


_FRAME_BYTES: Final = 5
#: fastavro needs minutes for a decimal with a megabyte of digits. Our reader refuses decimals that fit no column.
_DECIMAL: Final = "penstock-decimal"
_DECIMAL_BYTES_MAX: Final = 256
_DECIMAL_CONTEXT: Final = Context(prec=1000)


class AvroReader:
    def __init__(self, avro: str, schema: Any, *, framed: bool) -> None:
        """Raises PipelineError if fastavro is not installed."""
        # fastavro is optional, and slow to import.
        try:
            from fastavro import parse_schema, schemaless_reader
            from fastavro.read import LOGICAL_READERS
        except ImportError:
            raise PipelineError("Avro needs the package fastavro: pip install fastavro") from None
        LOGICAL_READERS |= {f"{kind}-{_DECIMAL}": _read_decimal for kind in ("bytes", "fixed")}
        self.kind = arrow_struct(schema)
        self._schema = parse_schema(_with_our_decimals(json.loads(avro)))
        self._read_one = schemaless_reader
        self._framed = framed

    def parse(self, values: pa.Array) -> Parsed:
        return parse_each(values, self.kind, self._read)

    def _read(self, value: bytes | None) -> dict[str, Any]:
        if value is None:
            raise RowError("there is no value")
        stream = io.BytesIO(self._unframed(value) if self._framed else value)
        try:
            row = self._read_one(stream, self._schema)
        except Exception as error:
            # fastavro raises many kinds of errors, all of which mean that the value is wrong.
            detail = f" ({error})" if str(error) else ""
            raise RowError(
                f"the value does not fit the Avro schema: {type(error).__name__}{detail}"
            ) from None
        rest = len(value) - (_FRAME_BYTES if self._framed else 0) - stream.tell()
        if rest:
            raise RowError(f"the value has {rest} bytes more than the schema describes")
        assert isinstance(row, dict)
        return row

    def _unframed(self, value: bytes) -> bytes:
        if len(value) < _FRAME_BYTES or value[0]:
            raise RowError("the value does not start with the five bytes of the schema registry format")
        return value[_FRAME_BYTES:]


def _with_our_decimals(document: Any) -> Any:
    if isinstance(document, list):
        return [_with_our_decimals(each) for each in document]
    if not isinstance(document, dict):
        return document
    found = {name: _with_our_decimals(each) for name, each in document.items()}
    return found | {"logicalType": _DECIMAL} if found.get("logicalType") == "decimal" else found


def _read_decimal(data: bytes, writer_schema: Any, reader_schema: Any = None) -> Decimal:
    if len(data) > _DECIMAL_BYTES_MAX:
        raise ValueError(f"a decimal of {len(data)} bytes is too long")
    return Decimal(int.from_bytes(data, signed=True)).scaleb(-writer_schema.get("scale", 0), _DECIMAL_CONTEXT)


_SCHEMA_SUFFIXES: Final = (".json", ".avsc", ".ddl", ".sql", ".txt")


def json_rows(schema: str | Path) -> JsonRows:
    """Return a parser of JSON objects. Raises PipelineError.

    schema: DDL such as "id STRING NOT NULL, amount DOUBLE", or a file with DDL, a JSON Schema or Spark's JSON schema.
        Values must contain the columns that are NOT NULL
    """
    text = _read_schema(schema)
    if text.lstrip().startswith("{"):
        text = columns_of_json_schema(_parse_schema(text, schema), str(schema))
    return JsonRows(schema=text)


def avro_rows(schema: str | Path, *, framed: bool = False) -> AvroRows:
    """Return a parser of Avro values. Raises PipelineError.

    schema: an Avro schema, or a file with one (.avsc)
    framed: whether values start with the five bytes of the schema registry format
    """
    text = _read_schema(schema)
    document = _parse_schema(text, schema)
    return AvroRows(
        schema=columns_of_avro_schema(document, str(schema)), avro=json.dumps(document), framed=framed
    )


def _read_schema(schema: str | Path) -> str:
    """Return the content of the file with this name, or the schema itself if it is not a file name."""
    is_file = isinstance(schema, Path) or (
        isinstance(schema, str) and schema.strip().lower().endswith(_SCHEMA_SUFFIXES) and "\n" not in schema
    )
    try:
        text = Path(str(schema).strip()).read_text() if is_file else str(schema)
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"the schema {schema} cannot be read: {error}") from None
    if not text.strip():
        raise PipelineError(f"the schema {schema} is empty")
    return text


def _parse_schema(text: str, schema: str | Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        name = f"the schema {schema}" if len(str(schema)) < 200 else "the schema"
        raise PipelineError(f"{name} is not valid JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRows:
    schema: str

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        # msgspec belongs to the extra `spark`, and a pipeline can be declared without it.
        from penstock.spark.pipelines.json_parser import JsonReader

        return JsonReader(schema).parse


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroRows:
    schema: str
    avro: str
    framed: bool

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        return AvroReader(self.avro, schema, framed=self.framed).parse


def struct_type(text: str, what: str) -> Any:
    """Parse DDL or Spark's JSON schema. Needs a session. Raises PipelineError."""
    # A pipeline can be declared without pyspark.
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        if text.lstrip().startswith("{"):
            return StructType.fromJson(json.loads(text))
        found = StructType.fromDDL(text)
    except (PySparkException, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PipelineError(f"{what}: {text!r} is not a valid schema ({reason})") from None
    if not isinstance(found, StructType):
        raise PipelineError(f"{what}: {text!r} is not a valid schema")
    return found
