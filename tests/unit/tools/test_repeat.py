"""`python -m tests.repeat` makes all runs, names failed tests and reports them."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FLAKY = """
from pathlib import Path

def test_green():
    pass

def test_fails_once():
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError
"""


def repeat(directory: Path, source: str, *words: str) -> tuple[int, str, list[dict[str, object]]]:
    (directory / "test_flaky.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\n")
    report = directory / "out" / "report.json"
    arguments = ("--", "-p", "no:cacheprovider", "-c", str(directory / "pytest.ini"), str(directory))
    done = subprocess.run(
        (sys.executable, "-m", "tests.repeat", "--report", str(report), *words, *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, json.loads(report.read_text())["runs"]


def test_goes_on_after_a_failure_and_exits_with_1(tmp_path: Path) -> None:
    code, output, runs = repeat(tmp_path, FLAKY, "--runs", "2", "--busy", "1")
    assert code == 1
    assert [(run["run"], run["passed"], run["failed"]) for run in runs] == [
        (1, 1, ["test_flaky.py::test_fails_once"]),
        (2, 2, []),
    ]
    assert all(run["seconds"] and run["load_average"] and "commit" in run for run in runs)
    assert re.search(r"^run 1 of 2: 1 passed, 1 failed in \d+ s, load average ", output, re.MULTILINE)
    assert "  test_flaky.py::test_fails_once\n" in output
    assert "AssertionError" in (tmp_path / "out" / "run-1.log").read_text()


def test_a_run_without_an_outcome_is_a_failure(tmp_path: Path) -> None:
    code, _, runs = repeat(tmp_path, "import os\n\ndef test_ends():\n    os._exit(7)\n", "--runs", "1")
    assert (code, runs[0]["failed"]) == (1, ["pytest ended with exit code 7"])


def test_green_runs_exit_with_0(tmp_path: Path) -> None:
    code, _, runs = repeat(tmp_path, "def test_green():\n    pass\n", "--runs", "1")
    assert (code, runs[0]["passed"], runs[0]["failed"]) == (0, 1, [])
