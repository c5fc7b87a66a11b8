"""Golden scripts: lines that begin with "> " are commands, what follows them is the output that they must have.

REWRITE_SCRIPTS=1 writes what happens now into them, for review in the diff.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

Run = Callable[[str], Iterable[str]]


def scripts_beside(test_file: str) -> list[Path]:
    return sorted((Path(test_file).parent / "scripts").glob("*.txt"))


def check_script(path: Path, run: Run) -> None:
    """`run` carries out one command and returns its output."""
    expected = path.read_text()
    actual = rewritten(expected, run)
    if os.environ.get("REWRITE_SCRIPTS"):
        path.write_text(actual)
    assert actual == expected


def rewritten(text: str, run: Run) -> str:
    """The script with the output that its commands have now."""
    lines = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines += [f"  {output}" for output in run(line[2:])]
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines) + "\n"
