"""Decimals that fit their columns. Looked at before Arrow sees them: very small ones end its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

#: Of a value and the name of its field: what is wrong, in a sentence.
Flaw = Callable[[Any, str], str | None]
#: More places after the point than this Arrow cannot take away, be they zeros.
_PLACES_MAX: Final = 38


def decimal_flaw(kind: pa.DataType) -> Flaw | None:
    """None where there are no decimals."""
    import pyarrow as pa

    if pa.types.is_decimal(kind):
        return _of_decimal(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        return _of_parts([decimal_flaw(kind.value_type)], _elements)
    if pa.types.is_map(kind):
        return _of_parts([decimal_flaw(kind.item_type)], _items)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return _of_parts([decimal_flaw(field.type) for field in kind], lambda value: _fields(value, names))
    return None


def _of_decimal(precision: int, scale: int) -> Flaw:
    unit = Decimal((0, (1,), -scale))
    exactly = Context(prec=precision, traps=[Inexact, InvalidOperation])

    def flaw(value: Any, name: str) -> str | None:
        if not isinstance(value, Decimal) or _fits(value, unit, exactly):
            return None
        told = str(value)
        told = told if len(told) <= 60 else told[:60] + "..."
        return f"{name} must fit decimal({precision},{scale}), and is {told}"

    return flaw


def _fits(value: Decimal, unit: Decimal, exactly: Context) -> bool:
    try:
        value.quantize(unit, context=exactly)
    except DecimalException:
        return False
    exponent = value.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= -_PLACES_MAX


# Values within values: the number of the check, the value and its name.

_Parts = Iterable[tuple[int, Any, str]]


def _of_parts(flaws: list[Flaw | None], parts: Callable[[Any], _Parts]) -> Flaw | None:
    if not any(flaws):
        return None

    def flaw(value: Any, name: str) -> str | None:
        for number, part, suffix in parts(value):
            check = flaws[number]
            found = check(part, f"{name}{suffix}") if check is not None else None
            if found is not None:
                return found
        return None

    return flaw


def _elements(value: Any) -> _Parts:
    if isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield 0, each, f"[{number}]"


def _items(value: Any) -> _Parts:
    pairs = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for pair in pairs:
        if isinstance(pair, tuple) and len(pair) == 2:
            yield 0, pair[1], f"[{pair[0]}]"


def _fields(value: Any, names: list[str]) -> _Parts:
    """Of dicts, and of tuples in the order of the columns."""
    if isinstance(value, dict):
        value = [value.get(name) for name in names]
    if isinstance(value, list | tuple):
        for number, (name, each) in enumerate(zip(names, value, strict=False)):
            yield number, each, f".{name}"
