"""The scripts in scripts/ are the specification of the quorum: every line of their output is checked.

REWRITE_SCRIPTS=1 writes what happens now into them, for review in the diff.
"""

import os
from pathlib import Path

import pytest
from tests.unit.raft.script import Script

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    expected = path.read_text()
    actual = rewritten(expected)
    if os.environ.get("REWRITE_SCRIPTS"):
        path.write_text(actual)
    assert actual == expected


def rewritten(text: str) -> str:
    """The script with the output that its commands have now."""
    script = Script()
    lines = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines += [f"  {output}" for output in script.run_line(line[2:])]
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines) + "\n"
