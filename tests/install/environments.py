"""Python environments with Penstock as users install it: from its wheel, with one extra, and with nothing else.

`installed` asks pip, which takes a minute and a gigabyte for Spark. `linked` takes the same packages from the
environment that runs the tests, by the requirements that the wheel declares: a package that an extra forgets to name
is missing in both.
"""

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str, cwd: Path, **variables: str) -> str:
        """As typed in a shell that knows nothing of any environment; whatever goes wrong is shown."""
        done = subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env=clean(variables),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def clean(variables: dict[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin", **variables}


def build_wheel(folder: Path) -> Path:
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel


def installed(folder: Path, wheel: Path, extra: str) -> Environment:
    """By pip, from an index."""
    venv.create(folder, with_pip=True)
    made = Environment(folder)
    _pip("--python", made.python, "install", f"{wheel}[{extra}]" if extra else str(wheel))
    return made


def linked(folder: Path, wheel: Path, extra: str, *others: str) -> Environment:
    """With what `wheel[extra]` and `others` require, as it is installed here."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = Environment(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(packages)
    program = folder / "bin" / "penstock"
    program.write_text(f"#!{made.python}\nimport sys\nfrom penstock.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    wanted = _required(_own_requirements(wheel), extra)
    for other in others:
        wanted |= {canonicalize_name(other)} | _closure(Requirement(other))
    for name in wanted:
        for entry in _top_level(importlib.metadata.distribution(name)):
            link = packages / entry.name
            if not link.exists():
                link.symlink_to(entry)
    return made


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _own_requirements(wheel: Path) -> list[str]:
    """As the wheel says, which an older installation of the project here may not."""
    (metadata,) = importlib.metadata.MetadataPathFinder.find_distributions(
        importlib.metadata.DistributionFinder.Context(name="penstock", path=[str(wheel)])
    )
    return metadata.requires or []


def _required(requirements: list[str], extra: str) -> set[str]:
    found: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if canonicalize_name(requirement.name) == "penstock":
            for other in requirement.extras:
                found |= _required(requirements, other)
        else:
            found |= {canonicalize_name(requirement.name)} | _closure(requirement)
    return found


def _closure(requirement: Requirement) -> set[str]:
    found: set[str] = set()
    left = [requirement]
    seen: set[tuple[str, frozenset[str]]] = set()
    while left:
        each = left.pop()
        key = (canonicalize_name(each.name), frozenset(each.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        for text in importlib.metadata.requires(each.name) or []:
            following = Requirement(text)
            marker = following.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *each.extras)):
                left.append(following)
    return found


def _top_level(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    """What lies in site-packages of it: packages, modules, and its own description."""
    base = Path(str(distribution.locate_file("")))
    names = {Path(str(file)).parts[0] for file in distribution.files or []}
    return (base / name for name in sorted(names - {"..", "__pycache__"}))
