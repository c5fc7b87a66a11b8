"""docs/requirements.md has a row for every requirement, with modules that exist and tests that pytest collects."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "requirements.md"
COUNTS = {"L": 7, "P": 8, "C": 7, "D": 5, "F": 6, "R": 9, "B": 5, "O": 6, "S": 8, "X": 3}
REQUIREMENTS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
OPEN = "open"


class Row(NamedTuple):
    line: str  # such as "D1 (applications)"; empty in the table of what cuts across the lines
    what: str
    modules: str
    tests: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("Line", "What"):
            assert len(cells) in (3, 4), f"a row has three or four cells: {line}"
            found.append(Row(*["", *cells][-4:]))
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def collected_tests(path: Path) -> frozenset[str]:
    """Return the names of tests that pytest collects from a file, by its naming rules: `test_x` and `TestX::test_y`."""
    if not path.name.startswith("test_") or not path.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name) if name.startswith("Test"):
                names |= {f"{name}::{each.name}" for each in node.body if is_test(each)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if is_test(node):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                names.add(f"{name}::runTest")  # a state machine of hypothesis
    return frozenset(names)


def is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_requirement_has_a_row(requirement: str) -> None:
    assert any(row.line.split()[0] == requirement for row in rows() if row.line)


def test_every_row_is_of_a_requirement() -> None:
    named = [row.line for row in rows() if row.line]
    assert len(named) == len(set(named))
    assert {name.split()[0] for name in named} == set(REQUIREMENTS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.line or row.what)
def test_a_row_names_modules_and_collected_tests_or_is_open(row: Row) -> None:
    if OPEN in (row.modules, row.tests):
        assert row.modules == row.tests == OPEN, "an open row names neither modules nor tests"
        return
    modules, tests = quoted(row.modules), quoted(row.tests)
    assert modules
    assert tests
    assert len(set(modules)) == len(modules)
    assert len(set(tests)) == len(tests)
    assert {
        name for name in modules if not (ROOT / "src" / name).is_file() and not (ROOT / name).is_file()
    } == set()
    assert {name for name in tests if not is_collected(name)} == set()


def is_collected(test: str) -> bool:
    """Whether pytest collects `file::test`, or anything from `file`."""
    path, _, name = test.partition("::")
    names = collected_tests(ROOT / path)
    return path.startswith("tests/") and (name in names if name else bool(names))


def test_only_tests_that_pytest_collects_count(tmp_path: Path) -> None:
    path = tmp_path / "test_example.py"
    path.write_text(
        "def test_a(): ...\ndef helper(): ...\nclass TestB:\n    async def test_c(self): ...\nclass D: ...\n"
    )
    assert collected_tests(path) == {"test_a", "TestB::test_c"}
    assert not is_collected("tests/unit/test_requirements.py::test_that_does_not_exist")
    assert not is_collected("tests/conftest.py")
    assert is_collected("tests/unit/test_requirements.py::test_every_row_is_of_a_requirement")
