"""The benchmarks of contracts run, commit what they handle, and write their results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.contracts.contests import CONTESTS, Result
from benchmarks.contracts.messages import Order, values
from benchmarks.contracts.metrics import verdicts
from benchmarks.contracts.plot import save_plot
from benchmarks.contracts.report import json_document

ROOT = Path(__file__).parent.parent.parent


def run(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.contracts", "--smoke", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.stat().st_size > 0 for path in out.glob("*.png")] == [True]
    (document,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
    return {each["name"]: each for each in document["results"]}


def test_a_contest_has_figures_of_a_loop_by_hand_and_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contests = run(tmp_path, "--only", "most")
    figures = contests["most"]["median"]
    assert set(figures) == {"bare-first", "penstock"}
    assert min(who["cpu_s_per_million"] for who in figures.values()) > 0
    assert contests["most"]["ratio"]["penstock"]["beside"] == "bare-first"


@pytest.mark.slow
def test_every_contest_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contests = run(tmp_path, "--only", "*")
    for contest in CONTESTS:
        assert set(contests[contest.name]["median"]) == {who.name for who in contest.contenders}


def held(rates: dict[str, list[float]], name: str = "least-100B") -> Result:
    contest = next(each for each in CONTESTS if each.name == name)
    rounds = {who: [{"messages_per_s": rate} for rate in found] for who, found in rates.items()}
    return Result(contest=contest, rounds=rounds)


def test_the_goal_is_a_ratio_of_neighbours() -> None:
    result = held({"bare": [100.0, 200.0, 300.0], "penstock": [81.0, 162.0, 150.0]})
    (verdict,) = verdicts([result])
    assert verdict.value == pytest.approx(0.81)
    assert verdict.is_reached
    slower = held({"bare": [100.0, 200.0, 300.0], "penstock": [79.0, 300.0, 150.0]})
    assert not verdicts([slower])[0].is_reached


def test_results_are_drawn_and_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [held({who.name: [1000.0] for who in contest.contenders}, contest.name) for contest in CONTESTS]
    save_plot(results, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    document = json_document(results, {"suite": "contracts"})
    assert document["results"][0]["ratio"]["penstock"]["messages_per_s"]["median"] == 1


def test_each_contender_is_compared_with_one_of_the_same_contest() -> None:
    for contest in CONTESTS:
        names = [who.name for who in contest.contenders]
        assert len(set(names)) == len(names)
        assert {who.beside for who in contest.contenders} - {None} <= set(names)


@pytest.mark.parametrize("value_bytes", [100, 1024])
def test_values_are_orders_of_a_size(value_bytes: int) -> None:
    made = values(value_bytes)
    assert {len(value) for value in made} == {value_bytes}
    assert Order(**json.loads(made[7])).id == 7
