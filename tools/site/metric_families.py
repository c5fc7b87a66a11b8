"""Reads the metrics of a node from the source of `penstock.broker.metrics`, without running a node.

A running node reports the metrics of a coordinator only once the coordinator is in use. The source names them all: as
`MetricFamily(kind, name, help, labels, ...)`, `gauge(name, help, ...)` and `counter(name, help, ...)`, with literal
arguments, or with names that are assigned literals before the call or that loop over a table of literals.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import penstock.broker.metrics

PACKAGE = Path(penstock.broker.metrics.__path__[0])

Names = Mapping[str, Any]


class Family(NamedTuple):
    kind: str
    name: str
    help: str
    labels: tuple[str, ...]


def declared_families() -> list[Family]:
    """Return all metrics in alphabetical order. Raises ValueError for a call whose arguments cannot be read."""
    found = {}
    for path in sorted(PACKAGE.glob("*.py")):
        module = ast.parse(path.read_text())
        names = dict(_literals(module.body))
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef):
                found |= {each.name: each for each in _families(function, names, path.name)}
    return sorted(found.values(), key=lambda each: each.name)


def _families(function: ast.FunctionDef, names: Names, file: str) -> Iterator[Family]:
    loops = [(each, _table(each, names)) for each in ast.walk(function) if isinstance(each, ast.For)]
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        before = [each for each in ast.walk(function) if getattr(each, "lineno", call.lineno) < call.lineno]
        known = {**names, **dict(_literals(before))}
        tables = [
            rows for loop, rows in loops if loop.lineno < call.lineno <= (loop.end_lineno or 0) and rows
        ]
        for row in tables[0] if tables else [{}]:
            values = [_value(each, {**known, **row}) for each in call.args]
            match call.func.id, values:
                case "MetricFamily", [str(kind), str(name), str(text), tuple(labels), _]:
                    yield Family(kind, name, text, labels)
                case ("gauge" | "counter") as kind, [str(name), str(text), _]:
                    yield Family(kind, name, text, ())
                case (("MetricFamily" | "gauge" | "counter"), _) if function.name not in ("gauge", "counter"):
                    raise ValueError(f"{file}:{call.lineno}: the name, help and labels must be literals")


def _table(loop: ast.For, names: Names) -> list[dict[str, Any]]:
    """Return the values of the loop's variables in each turn, for a loop over a table of literals."""
    rows = _value(loop.iter, names)
    if not (isinstance(rows, tuple) and isinstance(loop.target, ast.Tuple)):
        return []
    variables = [each.id for each in loop.target.elts if isinstance(each, ast.Name)]
    return [dict(zip(variables, row, strict=True)) for row in rows]


def _literals(statements: list[Any]) -> Iterator[tuple[str, Any]]:
    for each in sorted(statements, key=lambda each: getattr(each, "lineno", 0)):
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                yield name, _value(value, {})


def _value(expression: ast.expr, names: Names) -> Any:
    """Return the value of a literal or of a known name, and None for everything else."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return None
