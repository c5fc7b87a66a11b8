"""The same seed is the same run in every process, and a failure says how to repeat it."""

import subprocess
import sys

import pytest
from simulation.campaign import failure_lines
from simulation.run import WORLDS, Outcome


def replay(world: str, seed: int) -> str:
    command = [sys.executable, "-m", "simulation", "--world", world, "--seed", str(seed), "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_replays_to_the_same_trace(world: str) -> None:
    first = replay(world, 3)
    assert "digest " in first
    assert "FAULT" in first
    assert replay(world, 3) == first


def test_seeds_differ() -> None:
    assert replay("data", 1) != replay("data", 2)


def test_a_failure_says_how_to_repeat_it() -> None:
    outcome = Outcome(
        seed=7, world="data", invariant="acknowledged means committed", story="lost", notes=("x",)
    )
    lines = list(failure_lines(outcome))
    assert lines[0] == "seed 7 of world data broke: acknowledged means committed"
    assert lines[-1] == "replay: python -m simulation --world data --seed 7 --trace"
