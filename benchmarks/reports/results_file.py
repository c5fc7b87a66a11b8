"""The raw results of a run: one JSON document, whose first fields are the same for every benchmark program.

benchmarks/published/README.md describes the fields.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.reports.machine import machine_facts

#: What every document has, in this order. What else a program reports stands between `rounds` and `results`.
FIELDS = ("suite", "command", "commit", "when", "machine", "rounds", "results")

_RESULTS = Path(__file__).parents[1] / "results"


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=_RESULTS, metavar="DIR", help="folder for the JSON and PNG files"
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw results to this file")


def run_facts(suite: str, data_dir: Path, rounds: int) -> dict[str, Any]:
    """Return the fields that say what was run, on which commit and machine. Call it before the run."""
    return {
        "suite": suite,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _commit(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(data_dir),
        "rounds": rounds,
    }


def file_stem(document: Mapping[str, Any]) -> str:
    """Return the name of the files of a run in `--out`, without suffix: its time and its suite."""
    return f"{document['when'].replace(':', '').replace('+0000', 'Z')}-{document['suite']}"


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _commit() -> str:
    """Return the commit of the checkout, with `-dirty` if tracked files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
