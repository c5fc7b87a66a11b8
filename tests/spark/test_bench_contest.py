"""How the Spark benchmarks evaluate rounds: no result if rows differ, and ratios round by round."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.spark.contest import CONNECTOR, OURS, Contest, Result, Round, Turn, WrongRows, hold
from benchmarks.spark.metrics import scalings, verdicts
from benchmarks.spark.plot import save_plot
from benchmarks.spark.report import json_document
from benchmarks.spark.rows import chunks

RATES = {OURS: [400.0, 300.0, 800.0], CONNECTOR: [100.0, 100.0, 200.0]}


def contest(name: str = "read-100B-none", **hashes: int) -> Contest:
    @contextmanager
    def prepare(_stage: Any, _driver: Any) -> Iterator[list[Turn]]:
        yield [turn(who, hashes.get(who, 7)) for who in RATES]

    return Contest(
        name=name, title=name, cores=2, contenders=tuple(RATES), shown=("rows_per_s",), prepare=prepare
    )


def turn(who: str, checksum: int) -> Turn:
    rates = iter([1.0, *RATES[who]])  # the first round is the warm-up
    return Turn(who, lambda: Round({"rows_per_s": next(rates)}, checksum))


def held(contest: Contest) -> Result:
    stage: Any = SimpleNamespace(pace=SimpleNamespace(warm_ups=1, rounds=3))
    driver: Any = SimpleNamespace(ask=lambda _operation: {})
    result = Result(contest=contest)
    list(hold(contest, stage, driver, result))
    return result


def test_ratios_are_computed_within_a_round() -> None:
    result = held(contest())
    assert result.spread(OURS, "rows_per_s") == (400, 300, 800)
    assert result.ratio(CONNECTOR, "rows_per_s", OURS) == (4, 3, 4)
    assert [each.is_reached for each in verdicts([result])] == [True]


def test_different_rows_invalidate_the_result() -> None:
    with pytest.raises(WrongRows, match="connector has 8 where penstock has 7"):
        held(contest(connector=8))


def test_scaling_is_from_one_core_to_two() -> None:
    two, one = held(contest()), held(contest("read-100B-none-1-core"))
    one.rounds[OURS] = [{"rows_per_s": 200.0}]
    assert [(each.contender, each.factor) for each in scalings([two, one])] == [(OURS, 2.0), (CONNECTOR, 1.0)]


def test_results_are_drawn_and_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [held(contest())]
    save_plot(results, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    document = json_document(results, {"suite": "spark"})
    assert document["results"][0]["ratio"][CONNECTOR]["rows_per_s"]["median"] == 4


def test_all_values_differ() -> None:
    values = [value for chunk in chunks(70_000, 100) for value in chunk.column("value").to_pylist()]
    assert len(set(values)) == 70_000
    assert {len(value) for value in values} == {100}
