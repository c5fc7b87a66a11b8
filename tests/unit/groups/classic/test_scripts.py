"""The scripts in scripts/ are the specification of groups: every line of their output is checked."""

from pathlib import Path

import pytest
from tests.golden import check_script, scripts_beside
from tests.unit.groups.classic.script import Script


@pytest.mark.parametrize("path", scripts_beside(__file__), ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    check_script(path, Script().run)
