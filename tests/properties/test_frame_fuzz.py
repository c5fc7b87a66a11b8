"""For any bytes from a client, the node replies or disconnects; it does not fail, grow, or stop serving others."""

import json
import subprocess
import sys

FRAMES = 80_000


def fuzz(frames: int, seed: int) -> dict[str, int]:
    """In a process of its own, because the worst failure is one that takes the process with it."""
    command = [sys.executable, "-m", "tests.fuzz", "--frames", str(frames), "--seed", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, f"seed {seed}\n{run.stdout}\n{run.stderr[-5000:]}"
    result: dict[str, int] = json.loads(run.stdout)
    return result


def test_a_node_survives_tens_of_thousands_of_frames() -> None:
    result = fuzz(FRAMES, seed=20_261_115)
    assert result["answered"] > FRAMES / 10, "most of the frames must reach a handler, or this proves nothing"
    assert result["malformed"] > FRAMES / 10
