"""The jars of Apache Kafka: tests are skipped only if they cannot be fetched, with the reason."""

import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.brokers import kafka as peer_kafka
from tests.compat import apache_kafka

ROOT = Path(__file__).parents[3]


def test_without_maven_the_tests_are_left_out_in_so_many_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_kafka.shutil, "which", lambda tool: None)
    assert apache_kafka.main() == apache_kafka.LEFT_OUT
    assert "TESTS AGAINST APACHE KAFKA ARE LEFT OUT: `java` is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "ends_with", "runs"), [(0, 0, True), (75, 0, False), (1, 2, False)])
def test_the_make_target_fails_where_the_set_up_does(
    tmp_path: Path, code: int, ends_with: int, runs: bool
) -> None:
    """With an interpreter that only notes what it is asked for."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/asked\n[ "$2" = pytest ] || exit {code}\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "--silent", "--old-file", "pyproject.toml", "test-kafka", f"VENV={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ends_with, done.stderr
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["tests.compat.apache_kafka", *(["pytest"] if runs else [])]
