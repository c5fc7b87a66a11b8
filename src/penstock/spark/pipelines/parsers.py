"""Schema files of others as columns of Spark: JSON Schema and Avro. What has no column type is refused by name."""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.spark.pipelines.declaration import PipelineError

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


def from_json(document: Any, name: str) -> str:
    """JSON Schema, or what `df.schema.json()` gives, as the latter. Raises PipelineError."""
    if isinstance(document, dict) and document.get("type") == "struct":
        return json.dumps(document)
    if not isinstance(document, dict) or "properties" not in document:
        raise PipelineError(f"the schema {name} describes no object with properties")
    return json.dumps(_json_object(document, name, ""))


def _json_object(document: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    required = set(document.get("required", ()))
    fields = [
        _field(field, *_json_type(kind, name, f"{path}{field}"), required=field in required)
        for field, kind in document["properties"].items()
    ]
    return {"type": "struct", "fields": fields}


def _json_type(kind: Any, name: str, path: str) -> tuple[_Type, bool]:
    """The column type, and whether null is allowed."""
    if not isinstance(kind, dict):
        raise _refused(name, path, kind)
    named = kind.get("type")
    names = named if isinstance(named, list) else [named]
    may_be_null = "null" in names
    rest = [each for each in names if each != "null"]
    if len(rest) != 1:
        raise _refused(name, path, named)
    match rest[0]:
        case "object" if "properties" in kind:
            return _json_object(kind, name, f"{path}."), may_be_null
        case "object" if isinstance(kind.get("additionalProperties"), dict):
            value, value_null = _json_type(kind["additionalProperties"], name, f"{path}.*")
            return _map(value, contains_null=value_null), may_be_null
        case "array" if isinstance(kind.get("items"), dict):
            element, element_null = _json_type(kind["items"], name, f"{path}[]")
            return _array(element, contains_null=element_null), may_be_null
        case "string":
            return _JSON_FORMATS.get(kind.get("format", ""), "string"), may_be_null
        case scalar if scalar in _JSON_SCALARS:
            return _JSON_SCALARS[scalar], may_be_null
    raise _refused(name, path, named)


def from_avro(document: Any, name: str) -> str:
    """A record of Avro as JSON of Spark. Raises PipelineError."""
    if not isinstance(document, dict) or document.get("type") != "record":
        raise PipelineError(f"the schema {name} describes no Avro record")
    known: dict[str, Any] = {}
    return json.dumps(_avro_record(document, name, "", known))


def _avro_record(document: dict[str, Any], name: str, path: str, known: dict[str, Any]) -> dict[str, Any]:
    # A record within itself would have no end of columns: until it is read, it is not known.
    fields = []
    for field in document.get("fields", ()):
        kind, may_be_null = _avro_type(field["type"], name, f"{path}{field['name']}", known)
        fields.append(_field(field["name"], kind, may_be_null, required=True))
    if not fields:
        # Nor fixed values of no bytes: a list of what takes no bytes is as long as its writer says.
        raise _refused(name, path.removesuffix(".") or "the record", document)
    _remember(document, known)
    return {"type": "struct", "fields": fields}


def _remember(document: dict[str, Any], known: dict[str, Any]) -> None:
    """Named types may be used again by name, with a namespace or without."""
    known[_short(str(document.get("name", "")))] = document


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _avro_type(kind: Any, name: str, path: str, known: dict[str, Any]) -> tuple[_Type, bool]:
    if isinstance(kind, list):
        rest = [each for each in kind if each != "null"]
        if len(rest) != 1:
            raise _refused(name, path, kind)
        return _avro_type(rest[0], name, path, known)[0], len(rest) < len(kind)
    if isinstance(kind, str):
        if kind in _AVRO_SCALARS:
            return _AVRO_SCALARS[kind], False
        if _short(kind) not in known:
            raise _refused(name, path, kind)
        return _avro_type(known[_short(kind)], name, path, known)
    if not isinstance(kind, dict):
        raise _refused(name, path, kind)
    return _avro_complex(kind, name, path, known), False


def _avro_complex(kind: dict[str, Any], name: str, path: str, known: dict[str, Any]) -> _Type:
    logical = kind.get("logicalType")
    match kind.get("type"):
        case "record":
            return _avro_record(kind, name, f"{path}.", known)
        case "fixed" if not kind.get("size"):
            raise _refused(name, path, kind)
        case "array":
            element, element_null = _avro_type(kind["items"], name, f"{path}[]", known)
            return _array(element, contains_null=element_null)
        case "map":
            value, value_null = _avro_type(kind["values"], name, f"{path}.*", known)
            return _map(value, contains_null=value_null)
        case "bytes" | "fixed" if logical == "decimal":
            return f"decimal({kind['precision']},{kind.get('scale', 0)})"
        case "int" | "long" | "string" if logical in _AVRO_LOGICAL:
            return _AVRO_LOGICAL[logical]
        case str() as scalar if scalar in _AVRO_SCALARS:
            _remember(kind, known)
            return _AVRO_SCALARS[scalar]
    raise _refused(name, path, kind)


def _field(name: str, kind: _Type, may_be_null: bool, *, required: bool) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": may_be_null or not required, "metadata": {}}


def _array(element: _Type, *, contains_null: bool) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": contains_null}


def _map(value: _Type, *, contains_null: bool) -> dict[str, Any]:
    return {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": contains_null}


def _refused(name: str, path: str, kind: object) -> PipelineError:
    return PipelineError(f"the schema {name}: {path} is of type {json.dumps(kind)}, which no column can be")
