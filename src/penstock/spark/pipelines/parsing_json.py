"""JSON objects to Arrow columns: each value read by msgspec for its columns only, those that fit none told why."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.spark.pipelines.declaration import Parsed
from penstock.spark.pipelines.json_types import Words, row_type
from penstock.spark.pipelines.parsing_columns import arrow_struct, from_columns

if TYPE_CHECKING:
    import pyarrow as pa

_Decode = Callable[[bytes], msgspec.Struct]


class JsonReader:
    def __init__(self, schema: Any) -> None:
        """Raises PipelineError for types that JSON has no way to write."""
        self.kind = arrow_struct(schema)
        self._words = Words()
        kind = row_type(schema, self._words)
        self._decode: _Decode = msgspec.json.Decoder(kind).decode
        self._getters = [attrgetter(name) for name in kind.__struct_fields__]
        self._nothing = kind(**dict.fromkeys(kind.__struct_fields__))

    def parse(self, values: pa.Array) -> Parsed:
        # What msgspec skips it does not look into: text that is not UTF-8 would pass there.
        rows, errors = self._read(values.to_pylist(), self._decode if _is_utf8(values) else self._decode_text)
        columns = [list(map(getter, rows)) for getter in self._getters]
        return from_columns(columns, self.kind, [False] * len(rows), errors)

    def _decode_text(self, value: bytes) -> msgspec.Struct:
        return self._decode(str(value, "utf-8"))  # type: ignore[arg-type]

    def _read(self, values: list[Any], decode: _Decode) -> tuple[list[msgspec.Struct], dict[int, str]]:
        rows: list[msgspec.Struct] = []
        errors: dict[int, str] = {}
        reading = map(decode, values)
        while True:
            try:
                # A list keeps what it was given before the error, and the iterator goes on after it.
                rows.extend(reading)
                return rows, errors
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
                errors[len(rows)] = self._told(error, values[len(rows)])
                rows.append(self._nothing)

    def _told(self, error: Exception, value: bytes | None) -> str:
        if value is None:
            return "there is no value"
        match error:
            case msgspec.ValidationError():
                return self._words.told(error)
            case msgspec.DecodeError():
                return f"the value is no JSON: {str(error).removeprefix('JSON is malformed: ')}"
            case UnicodeDecodeError():
                return f"the value is not UTF-8 (byte {error.start})"
            case RecursionError():
                return "the value is nested too deeply"
        raise error


def _is_utf8(values: pa.Array) -> bool:
    import pyarrow as pa

    try:
        values.cast(pa.string())
    except pa.ArrowException:
        return False
    return True
