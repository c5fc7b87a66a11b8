"""Loading a pipeline from the command line: files, modules, built-in ones, and errors."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.spark.pipelines import loader
from penstock.spark.pipelines.declaration import Pipeline, Source
from penstock.spark.pipelines.loader import BUILT_IN, BuiltIn, LoadingError, load, settings_usage

TWO = """
from penstock.spark.pipelines.declaration import pipeline
@pipeline("clean-orders", source="orders", sink="clean")
def clean(rows): return rows
also_clean = clean
"""
MORE = """
@pipeline("totals", source="orders", sink="totals")
def totals(rows): return rows
def made(*, topic, every="1s", from_="x"):
    return pipeline(topic, source=from_, sink="b", every=every)(lambda rows: rows)
number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    before = set(sys.modules)
    yield tmp_path
    for name in ("shop", "stock", "penstock_test_shop"):
        if name not in before:
            sys.modules.pop(name, None)


def test_a_file_with_one_pipeline_needs_no_name(folder: Path) -> None:
    (folder / "shop.py").write_text(TWO)
    assert load("shop.py", {}).name == "clean-orders"
    assert str(folder) in os.environ["PYTHONPATH"].split(os.pathsep)  # what it imports, workers find too


def test_one_of_several_is_named_by_variable_or_by_its_own_name(folder: Path) -> None:
    (folder / "shop.py").write_text(TWO + MORE)
    assert load("shop.py:clean", {}) is not None
    assert load("shop.py:clean-orders", {}).name == "clean-orders"
    assert load("shop:totals", {}).name == "totals"
    with pytest.raises(LoadingError, match=r"shop.py declares clean-orders, totals: select one"):
        load("shop.py", {})


def test_what_a_file_imports_is_looked_for_next_to_it(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "stock.py").write_text("NAME = 'orders'\n")
    (folder / "elsewhere" / "shop.py").write_text(
        "from stock import NAME\n" + TWO.replace('"orders"', "NAME")
    )
    found = load("elsewhere/shop.py", {})
    assert isinstance(found, Pipeline)
    assert found.source == Source(topics=("orders",))


def test_a_function_makes_one_of_settings(folder: Path) -> None:
    (folder / "shop.py").write_text(TWO + MORE)
    found = load("shop.py:made", {"topic": "p", "from": "orders", "every": "5s"})
    assert isinstance(found, Pipeline)
    assert (found.name, found.source.topics, found.every_ms) == ("p", ("orders",), 5_000)


@pytest.mark.parametrize(
    ("target", "settings", "complaint"),
    [
        ("nowhere.py", {}, "there is no file nowhere.py"),
        ("nowhere:x", {}, "there is no module nowhere"),
        ("archiv", {}, "did you mean archive?"),
        ("shop.py:claen", {}, "shop.py has no claen; did you mean clean?"),
        ("shop.py:number", {}, "shop.py:number is not a pipeline but a int"),
        ("shop.py:clean", {"a": "b"}, "takes no settings, and a is given"),
        ("shop.py:made", {}, "needs topic=...; it takes topic=... [every=1s] [from=x]"),
        ("shop.py:made", {"topic": "p", "evry": "1"}, "has no setting evry; it takes topic=..."),
        ("shop.py:made", {"topic": "no name"}, "a pipeline cannot be named 'no name'"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, target: str, settings: dict[str, str], complaint: str) -> None:
    (folder / "shop.py").write_text(TWO + MORE)
    with pytest.raises(Exception, match=r".") as caught:
        load(target, settings)
    assert complaint in str(caught.value)


def test_a_module_that_is_not_there_is_said_with_who_wants_it(folder: Path) -> None:
    (folder / "shop.py").write_text("import nothing_of_this_name\n")
    for target in ("shop.py", "shop:x"):
        with pytest.raises(LoadingError, match=r"^shop(\.py)?: No module named 'nothing_of_this_name'$"):
            load(target, {})


@dataclass
class Hello:
    greeting: str
    name: str = "hello"

    def run(self, context: object) -> None: ...


def hello(*, greeting: str, to_whom: str = "") -> Hello:
    return Hello(greeting)


def test_built_in_ones_are_made_of_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "penstock_test_shop"
    sys.modules[module] = sys.modules[__name__] if __name__ in sys.modules else _this_module()
    monkeypatch.setattr(loader, "BUILT_IN", {"hello": BuiltIn(f"{module}:hello", "greets")})
    assert load("hello", {"greeting": "hi", "to-whom": "all"}) == Hello("hi")
    assert settings_usage("hello") == "greeting=... [to_whom=]"
    with pytest.raises(
        LoadingError, match=r"hello needs greeting=\.\.\.; it takes greeting=\.\.\. \[to_whom=\]"
    ):
        load("hello", {})


def _this_module() -> object:
    return type("Module", (), {"hello": staticmethod(hello)})


def test_every_built_in_one_says_what_it_is() -> None:
    for name, each in BUILT_IN.items():
        assert ":" in each.factory, name
        assert each.help, name
