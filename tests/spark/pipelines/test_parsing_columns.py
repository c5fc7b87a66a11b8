"""Python values become columns. A value that does not fit is an error that names it, and never ends the process."""

from decimal import Decimal

import pyarrow as pa

from penstock.spark.pipelines.arrow_values import struct_from_rows

MONEY = pa.decimal128(6, 2)
KIND = pa.struct(
    [
        ("price", MONEY),
        ("line", pa.struct([("no", pa.int32()), ("price", MONEY)])),
        ("prices", pa.list_(MONEY)),
        ("by_name", pa.map_(pa.string(), MONEY)),
    ]
)
TINY = Decimal("1E-999999999")


def test_decimals_that_arrow_cannot_handle_are_errors_at_any_depth():
    rows = [
        {"price": TINY},
        {"line": {"no": 1, "price": TINY}},
        {"line": (1, TINY)},
        {"prices": [Decimal(1), TINY]},
        {"by_name": {"a": TINY}},
        {"by_name": [("a", TINY)]},
        {"price": Decimal("1." + "0" * 50)},
        {"price": Decimal("0E+999999999")},
    ]
    found = struct_from_rows(list(rows), KIND, {})
    names = [error.split(" must ")[0] for _, error in sorted(found.errors.items())]
    assert names == ["price", *["line.price"] * 2, "prices[1]", *["by_name[a]"] * 2, "price", "price"]
    assert found.rows.null_count == len(rows)


def test_values_that_fit_are_kept_beside_others():
    line = {"no": 1, "price": Decimal("12.3400")}
    rows = [{"line": line}, {"line": {"no": "one"}}, None, {"line": 5}, {"price": 7, "prices": (Decimal(1),)}]
    found = struct_from_rows(rows, KIND, {})
    assert sorted(found.errors) == [1, 3]
    assert found.errors[1].startswith("line must be struct<no: int32")
    assert [row and (row["line"], row["price"], row["prices"]) for row in found.rows.to_pylist()] == [
        ({"no": 1, "price": Decimal("12.34")}, None, None),
        None,
        None,
        None,
        (None, Decimal(7), [Decimal(1)]),
    ]
