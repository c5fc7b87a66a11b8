"""Avro values to Arrow columns, one by one."""

from __future__ import annotations

import io
import json
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed, PipelineError
from penstock.spark.pipelines.parsing_columns import RowError, arrow_struct, parse_each

if TYPE_CHECKING:
    import pyarrow as pa

_FRAME: Final = 5
#: fastavro's own decimals take minutes for a megabyte of digits; these refuse what no column can hold.
_DECIMAL: Final = "penstock-decimal"
_DECIMAL_BYTES_MAX: Final = 256
_EXACTLY: Final = Context(prec=1000)


class AvroReader:
    def __init__(self, avro: str, schema: Any, *, framed: bool) -> None:
        """Raises PipelineError."""
        try:
            from fastavro import parse_schema, schemaless_reader
            from fastavro.read import LOGICAL_READERS
        except ImportError:
            raise PipelineError("Avro needs a package more: pip install fastavro") from None
        LOGICAL_READERS |= {f"{kind}-{_DECIMAL}": _decimal for kind in ("bytes", "fixed")}
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
            # Whatever its reader stumbles over, it is the value that is wrong.
            told = f" ({error})" if str(error) else ""
            raise RowError(f"the value is no Avro of this schema: {type(error).__name__}{told}") from None
        rest = len(value) - (_FRAME if self._framed else 0) - stream.tell()
        if rest:
            raise RowError(f"the value goes on for {rest} bytes after its end by the schema")
        assert isinstance(row, dict)
        return row

    def _unframed(self, value: bytes) -> bytes:
        if len(value) < _FRAME or value[0]:
            raise RowError("the value does not begin with the five bytes of a schema registry")
        return value[_FRAME:]


def _with_our_decimals(document: Any) -> Any:
    if isinstance(document, list):
        return [_with_our_decimals(each) for each in document]
    if not isinstance(document, dict):
        return document
    found = {name: _with_our_decimals(each) for name, each in document.items()}
    return found | {"logicalType": _DECIMAL} if found.get("logicalType") == "decimal" else found


def _decimal(data: bytes, writer_schema: Any, reader_schema: Any = None) -> Decimal:
    if len(data) > _DECIMAL_BYTES_MAX:
        raise ValueError(f"a decimal of {len(data)} bytes")
    return Decimal(int.from_bytes(data, signed=True)).scaleb(-writer_schema.get("scale", 0), _EXACTLY)
