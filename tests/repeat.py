"""Runs a pytest command many times and reports each run: `python -m tests.repeat --runs 10 -- -m "not slow"`.

`make test-repeat RUNS=10 BUSY=2` runs the command of `make test`. BUSY processes keep one core each busy meanwhile. All
runs are made, also after one that failed; the exit code is 1 if any run failed. The report is a JSON file, which is
written after every run. The output of run 3 is in `run-3.log` beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

_OPTION = "--outcome-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    commit: str
    run: int
    seconds: float
    passed: int
    failed: list[str]  # ids of tests that failed or had an error; or why pytest ended without an outcome
    load_average: list[float]  # over 1, 5 and 15 minutes, at the end of the run

    def summary(self, runs: int) -> str:
        head = f"run {self.run} of {runs}: {self.passed} passed, {len(self.failed)} failed"
        return f"{head} in {self.seconds:.0f} s, load average {self.load_average[0]:.1f}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep one core each busy")
    parser.add_argument("--report", type=Path, default=Path("build/repeat/report.json"))
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args(words)
    given.report.parent.mkdir(parents=True, exist_ok=True)
    done: list[Run] = []
    with busy_processes(given.busy):
        for number in range(1, given.runs + 1):
            done.append(run_once(number, given.pytest, given.report.parent))
            report = {"busy": given.busy, "pytest": given.pytest, "runs": [asdict(each) for each in done]}
            given.report.write_text(json.dumps(report, indent=2) + "\n")
            print(done[-1].summary(given.runs), flush=True)
            for name in done[-1].failed:
                print(f"  {name}", flush=True)
    return 1 if any(each.failed for each in done) else 0


def run_once(number: int, arguments: Sequence[str], directory: Path) -> Run:
    outcome_file = directory / f"run-{number}.json"
    outcome_file.unlink(missing_ok=True)
    command = (sys.executable, "-m", "pytest", "-p", "tests.repeat", _OPTION, str(outcome_file), *arguments)
    started = time.monotonic()
    with open(directory / f"run-{number}.log", "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    outcome = {"passed": 0, "failed": []}
    if outcome_file.exists():
        outcome = json.loads(outcome_file.read_text())
        outcome_file.unlink()
    if code != 0 and not outcome["failed"]:
        outcome["failed"] = [f"pytest ended with exit code {code}"]
    return Run(
        commit=current_commit(),
        run=number,
        seconds=round(time.monotonic() - started, 1),
        passed=outcome["passed"],
        failed=outcome["failed"],
        load_average=[round(each, 2) for each in os.getloadavg()],
    )


def current_commit() -> str:
    """Return the commit that is checked out, with `+` if files differ from it; empty outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# As a plugin of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION, type=Path, help="write the number of passed tests and the ids of failed ones here"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Runs in the process that collects the results of all xdist workers."""
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    outcome = {"passed": len(stats.get("passed", ())), "failed": sorted(failed)}
    config.getoption(_OPTION).write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.exit(main())
