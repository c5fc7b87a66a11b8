"""JSON objects to Arrow columns: many at once by Arrow where that is right, one by one where Arrow will not have them.

Arrow's reader takes lines of JSON. It is given only values that are one object each as far as can be seen without
parsing: it cannot be trusted with others, for it takes two objects in one value for two rows, and a bare `null` ends
the process. What it reads is what `json` would have read; all that it refuses is read by `json`, which tells why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.declaration import Parsed
from penstock.spark.pipelines.json_checks import decoder, loads, struct_check
from penstock.spark.pipelines.parsing import arrow_struct, parse_each

if TYPE_CHECKING:
    import pyarrow as pa

#: After an object comes nothing but more of what it is in; and there are no numbers that JSON does not know.
_SUSPECT: Final = r"\}[ \t\r\n]*[^ \t\r\n,}\]]|[:,\[][ \t\r\n]*-?[NI]|\x00"
_OBJECT: Final = r"^\{"
#: A value of less than this cannot be nested so deeply that `json` would not read it.
_BYTES_SHALLOW: Final = 1_000
_BRACKETS_MAX: Final = 400
#: Where a batch is refused, so many are tried together before they are read one by one.
_TOGETHER: Final = 128


class _Refused(Exception):
    """By Arrow; `json` has the last word."""


class JsonReader:
    def __init__(self, schema: Any) -> None:
        """Raises PipelineError for types that JSON has no way to write."""
        self.kind = arrow_struct(schema)
        self._check = struct_check(schema, "")
        self._decode = decoder(exact="decimal" in schema.simpleString())
        self._required = [field.name for field in schema.fields if not field.nullable]
        #: None where all are read one by one.
        self._fast = None
        if not any(_has_required(field.dataType) for field in schema.fields):
            self._fast = _fast_schema(self.kind)

    def parse(self, values: pa.Array) -> Parsed:
        import pyarrow as pa

        if self._fast is None or not len(values):
            return self._one_by_one(values)
        try:
            return self._together(values)
        except _Refused:
            parts = [self._part(values.slice(at, _TOGETHER)) for at in range(0, len(values), _TOGETHER)]
        errors = {
            index * _TOGETHER + number: error
            for index, part in enumerate(parts)
            for number, error in part.errors.items()
        }
        return Parsed(pa.concat_arrays([part.rows for part in parts]), errors)

    def _part(self, values: pa.Array) -> Parsed:
        try:
            return self._together(values)
        except _Refused:
            return self._one_by_one(values)

    # One by one

    def _one_by_one(self, values: pa.Array) -> Parsed:
        return parse_each(values, self.kind, self._read)

    def _read(self, value: bytes | None) -> dict[str, Any]:
        row: dict[str, Any] = self._check(loads(value, self._decode), "the value")
        return row

    # Together

    def _together(self, values: pa.Array) -> Parsed:
        """Raises _Refused."""
        import pyarrow as pa
        import pyarrow.compute as pc

        assert self._fast is not None
        texts = _utf8(values)
        is_fit = _fit(texts)
        if pc.all(is_fit).as_py():
            return Parsed(self._arrow(texts), {})
        others = pc.indices_nonzero(pc.invert(is_fit))
        if len(others) * 2 > len(values):
            raise _Refused
        read = self._arrow(pc.if_else(is_fit, texts, "{}"), is_fit)
        each = self._one_by_one(values.take(others))
        order = pc.replace_with_mask(
            pa.array(range(len(values)), pa.int64()),
            pc.invert(is_fit),
            pa.array(range(len(values), len(values) + len(others)), pa.int64()),
        )
        where = others.to_pylist()
        errors = {where[number]: error for number, error in each.errors.items()}
        return Parsed(pa.concat_arrays([read, each.rows]).take(order), errors)

    def _arrow(self, texts: pa.Array, counts: pa.Array | None = None) -> pa.StructArray:
        import pyarrow as pa

        rows = _read_lines(texts, self._fast)
        if len(rows) != len(texts):
            raise _Refused
        self._refuse_doubtful(rows, counts)
        try:
            return rows.cast(self.kind)
        except pa.ArrowException:
            raise _Refused from None

    def _refuse_doubtful(self, rows: pa.StructArray, counts: pa.Array | None) -> None:
        """Nulls where there must be none, and numbers that became infinite."""
        for name in self._required:
            column = rows.field(name)
            if counts is not None:
                column = column.filter(counts)
            if column.null_count:
                raise _Refused
        if not all(map(_is_finite, rows.flatten())):
            raise _Refused


def _utf8(values: pa.Array) -> pa.Array:
    import pyarrow as pa

    try:
        return values.cast(pa.string())
    except pa.ArrowException:
        raise _Refused from None


def _fit(texts: pa.Array) -> pa.Array:
    """Those that Arrow's reader can be trusted with."""
    import pyarrow.compute as pc

    is_object = pc.match_substring_regex(texts, _OBJECT)
    is_fit = pc.and_not(is_object, pc.match_substring_regex(texts, _SUSPECT))
    longest = pc.max(pc.binary_length(texts)).as_py()
    if longest is not None and longest > _BYTES_SHALLOW:
        brackets = pc.add(pc.count_substring(texts, "["), pc.count_substring(texts, "{"))
        is_fit = pc.and_(is_fit, pc.less(brackets, _BRACKETS_MAX))
    return pc.fill_null(is_fit, False)


def _read_lines(texts: pa.Array, schema: pa.Schema) -> pa.StructArray:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    whole = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    data = pc.binary_join(whole, "\n")[0].as_buffer()
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=max(data.size + 1, 64)),
            parse_options=pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=True
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        raise _Refused from None
    return table.combine_chunks().to_struct_array().combine_chunks()


def _is_finite(column: pa.Array) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return bool(pc.all(pc.is_finite(column)).as_py() is not False)
    if pa.types.is_struct(column.type) or pa.types.is_list(column.type):
        parts = column.flatten()
        return all(map(_is_finite, parts)) if isinstance(parts, list) else _is_finite(parts)
    return True


# What Arrow reads


def _fast_schema(kind: pa.StructType) -> pa.Schema | None:
    """None where there are types that Arrow reads in another way than we do."""
    import pyarrow as pa

    fields = [_fast_field(field) for field in kind]
    return None if not fields or any(each is None for each in fields) else pa.schema(fields)


def _fast_field(field: pa.Field) -> pa.Field | None:
    kind = _fast_type(field.type)
    return None if kind is None else field.with_type(kind).with_nullable(True)


def _fast_type(kind: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return kind
    if pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return kind
    if pa.types.is_list(kind):
        element = _fast_field(kind.value_field)
        return None if element is None else pa.list_(element)
    if pa.types.is_struct(kind):
        fields = [_fast_field(each) for each in kind]
        return None if any(each is None for each in fields) else pa.struct(fields)
    return None


def _has_required(kind: Any) -> bool:
    """Below the top."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, StructType):
        return any(not field.nullable or _has_required(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return not kind.containsNull or _has_required(kind.elementType)
    return False
