"""The scripts in scripts/ are the specification of consumer groups: every line of their output is checked."""

from pathlib import Path

import pytest
from tests.golden import check_script, scripts_beside
from tests.unit.groups.consumer.script import ConsumerScript


@pytest.mark.parametrize("path", scripts_beside(__file__), ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    check_script(path, ConsumerScript().run)
