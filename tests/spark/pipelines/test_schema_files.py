"""Schema files of other tools give the expected columns."""

import json

import pytest
from pyspark.sql.types import StructType

from penstock.spark.pipelines.declaration import PipelineError
from penstock.spark.pipelines.parsers import avro_rows, json_rows

JSON_SCHEMA = {
    "type": "object",
    "required": ["id", "lines"],
    "properties": {
        "id": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "lines": {
            "type": "array",
            "items": {"type": "object", "required": ["price"], "properties": {"price": {"type": "number"}}},
        },
        "tags": {"type": "object", "additionalProperties": {"type": "boolean"}},
    },
}
LINE = {"type": "record", "name": "L", "fields": [{"name": "k", "type": "int"}]}
AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "count", "type": ["null", "long"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "other", "type": "shop.Kind"},
        {"name": "lines", "type": {"type": "array", "items": LINE}},
        {"name": "line", "type": ["null", "L"]},
    ],
}


def columns(parser):
    return StructType.fromJson(json.loads(parser.schema)).simpleString()


def required(parser):
    return [field["name"] for field in json.loads(parser.schema)["fields"] if not field["nullable"]]


def test_json_schema(tmp_path):
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(JSON_SCHEMA))
    parser = json_rows(path)
    assert columns(parser) == (
        "struct<id:string,count:bigint,at:timestamp,day:date,lines:array<struct<price:double>>,"
        "tags:map<string,boolean>>"
    )
    assert required(parser) == ["id", "lines"]
    assert json_rows(str(path)) == parser


def test_sparks_own_json_and_ddl_in_a_file(tmp_path):
    wanted = {"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": True, "metadata": {}}]}
    assert columns(json_rows(json.dumps(wanted))) == "struct<a:bigint>"
    path = tmp_path / "orders.ddl"
    path.write_text("id STRING NOT NULL")
    assert json_rows(path).schema == "id STRING NOT NULL"


def test_avro_schema(tmp_path):
    path = tmp_path / "orders.avsc"
    path.write_text(json.dumps(AVRO))
    parser = avro_rows(path)
    assert columns(parser) == (
        "struct<id:string,count:bigint,at:timestamp,price:decimal(10,2),kind:string,other:string,"
        "lines:array<struct<k:int>>,line:struct<k:int>>"
    )
    assert "count" not in required(parser)


@pytest.mark.parametrize(
    "kind", [{"type": ["string", "integer"]}, {"type": "array"}, {"$ref": "#/x"}, {"type": "object"}, True]
)
def test_types_without_a_column_type_are_refused(kind):
    schema = {"type": "object", "properties": {"odd": kind}}
    with pytest.raises(PipelineError, match="odd has the type"):
        json_rows(json.dumps(schema))


def test_avro_without_a_column_type_is_refused():
    fields = [{"name": "odd", "type": ["string", "long"]}]
    with pytest.raises(PipelineError, match="odd has the type"):
        avro_rows(json.dumps({"type": "record", "name": "R", "fields": fields}))
    within = [{"name": "next", "type": ["null", "R"]}]
    with pytest.raises(PipelineError, match='next has the type "R"'):
        avro_rows(json.dumps({"type": "record", "name": "R", "fields": within}))
    with pytest.raises(PipelineError, match="does not describe an Avro record"):
        avro_rows('{"type": "string"}')


@pytest.mark.parametrize(
    "kind", [{"type": "record", "name": "E", "fields": []}, {"type": "fixed", "name": "E", "size": 0}]
)
def test_avro_types_of_no_bytes_are_refused(kind):
    """A few bytes could declare billions of them."""
    fields = [{"name": "odd", "type": {"type": "array", "items": kind}}]
    with pytest.raises(PipelineError, match=r"odd\[\] has the type"):
        avro_rows(json.dumps({"type": "record", "name": "R", "fields": fields}))
