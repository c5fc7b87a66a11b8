"""The search for planted secrets finds them in every form, and nothing else."""

import base64
import subprocess
import sys
from pathlib import Path

import pytest
from tests.planted import PlantedSecrets, command_lines


@pytest.mark.parametrize("lead", ["", "a", "ab", "abc"])
def test_every_form_is_found(lead: str) -> None:
    planted = PlantedSecrets()
    secret = planted.new("purpose")
    text = f"{lead}{secret} and more".encode()
    for shown in (text, text.hex().encode(), base64.b64encode(text), base64.urlsafe_b64encode(text)):
        assert planted.found_in(shown) == {"purpose"}
    assert not planted.found_in(base64.b64encode(b"something else that is just as long as the secret"))


def test_files_and_command_lines_are_searched(tmp_path: Path) -> None:
    planted = PlantedSecrets()
    secret = planted.new("argument")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "log").write_text(f"password={secret}")
    with pytest.raises(AssertionError, match="argument"):
        planted.check_files(tmp_path)
    planted.check_files(tmp_path, but=frozenset({"log"}))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()", secret],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == b"up\n"
    assert planted.found_in(command_lines()) == {"argument"}
    sleeper.communicate(b"\n")
