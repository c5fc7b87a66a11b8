"""Whether rows fit a table: new columns make it wider, anything else that differs is refused. Pure.

Delta writes schemas down as Spark does, so both sides are compared as that JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.spark.archive.errors import SchemaChanged


def table_schema(rows: str) -> str:
    """That of a table for such rows: whatever a column holds, there may come rows without it."""
    return json.dumps(_lenient(json.loads(rows)))


def new_fields(table: str, rows: str, name: str) -> list[dict[str, Any]]:
    """The columns that the table needs in addition. Raises SchemaChanged where that would not do."""
    known = {field["name"]: field for field in json.loads(table)["fields"]}
    wanted: list[dict[str, Any]] = json.loads(table_schema(rows))["fields"]
    _refuse_other_types(known, wanted, name)
    added = [field for field in wanted if field["name"] not in known]
    _refuse_twins(known, added, name)
    return added


def _refuse_other_types(known: Mapping[str, Any], wanted: list[dict[str, Any]], name: str) -> None:
    for field in wanted:
        there = known.get(field["name"])
        if there is not None and _lenient(there["type"]) != field["type"]:
            raise SchemaChanged(
                f"column {field['name']} of table {name} is {_said(there['type'])}, and new rows have "
                f"{_said(field['type'])}: give the column another name, or archive to another table"
            )


def _refuse_twins(known: Mapping[str, Any], added: list[dict[str, Any]], name: str) -> None:
    alike = {each.lower(): each for each in known}
    for field in added:
        twin = alike.get(field["name"].lower())
        if twin is not None:
            raise SchemaChanged(
                f"table {name} has a column {twin}, and new rows one named {field['name']}: "
                "names of columns that differ in case only are the same to Delta"
            )


def _lenient(kind: Any) -> Any:
    """With everything nullable, and without remarks."""
    if not isinstance(kind, dict):
        return kind
    match kind.get("type"):
        case "struct":
            return {"type": "struct", "fields": [_lenient_field(each) for each in kind["fields"]]}
        case "array":
            return {"type": "array", "elementType": _lenient(kind["elementType"]), "containsNull": True}
        case "map":
            sides = {side: _lenient(kind[side]) for side in ("keyType", "valueType")}
            return {"type": "map", **sides, "valueContainsNull": True}
        case _:
            return kind


def _lenient_field(field: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": field["name"], "type": _lenient(field["type"]), "nullable": True, "metadata": {}}


def _said(kind: Any) -> str:
    return kind if isinstance(kind, str) else str(kind["type"])
