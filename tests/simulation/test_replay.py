"""The same seed is the same run, in every process; a failure tells its seed and how to see it again."""

import os
import subprocess
import sys

from simulation.campaign import failure_lines
from simulation.mutations import MUTATIONS
from simulation.run import run_seed

WORLDS = ("transactions", "consumer", "share", "schedule")
PROGRAM = f"""
from simulation.run import run_seed
print([run_seed(seed).digest for seed in range(12)])
print([run_seed(seed, name=world).digest for world in {WORLDS} for seed in range(2)])
"""


def _digests(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_seed_runs_the_same_in_every_process() -> None:
    small = [run_seed(seed).digest for seed in range(12)]
    others = [run_seed(seed, name=world).digest for world in WORLDS for seed in range(2)]
    assert _digests("1") == _digests("2") == f"{small}\n{others}\n"


def test_seeds_differ() -> None:
    assert len({run_seed(seed).digest for seed in range(6)}) == 6


def test_a_failure_tells_its_story_and_replays() -> None:
    bug = next(mutation for mutation in MUTATIONS if mutation.name == "ack-before-sync")
    with bug.switched_on():
        first, again = run_seed(0), run_seed(0)
    assert not first.is_clean
    assert first == again
    told = "\n".join(failure_lines(first))
    assert "seed 0 of world small broke: in-sync replicas hold what is committed" in told
    assert "--world small --seed 0 --trace" in told
    assert "leads" in told


def test_a_trace_tells_every_step_of_the_story() -> None:
    lines: list[str] = []
    outcome = run_seed(1, tell=lines.append)
    assert outcome.is_clean
    assert sum("FAULT" in line for line in lines) >= sum(outcome.fired.values())
