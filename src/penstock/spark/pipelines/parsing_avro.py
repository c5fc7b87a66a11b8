"""Avro values to Arrow columns, one by one."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed, PipelineError
from penstock.spark.pipelines.parsing import RowError, arrow_struct, parse_each

if TYPE_CHECKING:
    import pyarrow as pa

_FRAME: Final = 5


class AvroReader:
    def __init__(self, avro: str, schema: Any, *, framed: bool) -> None:
        """Raises PipelineError."""
        try:
            from fastavro import parse_schema, schemaless_reader
        except ImportError:
            raise PipelineError("Avro needs a package more: pip install fastavro") from None
        self.kind = arrow_struct(schema)
        self._schema = parse_schema(json.loads(avro))
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
