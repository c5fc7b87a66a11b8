"""Power loss for a real broker process: what was synced stays, what was not may be torn or gone.

`kill -9` keeps the page cache, so it proves nothing about fsync. Here the broker runs with `os.fsync` and
`os.fdatasync` wrapped to write down how long each file was when a sync of it began, and with whatever shortens, moves
or removes a file wrapped to write that down too. After the kill every file is cut back to its synced length, plus a
torn piece of what followed.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

JOURNAL = "CRASH_JOURNAL"
BOOT = ".boot"  # a node compares it to find out whether its machine was restarted
SPARED = (".lock", BOOT)


class SyncRecorder:
    """Wraps what the `os` module offers; each call is written down once it has returned."""

    def __init__(self, journal: Path) -> None:
        self._file = journal.open("a", buffering=1)
        self._cuts: dict[str, int] = {}  # path -> shortest length since a sync of it began
        self._original: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        for name, wrap in (
            ("fsync", self._syncing),
            ("fdatasync", self._syncing),
            ("rename", self._renaming),
            ("replace", self._renaming),
            ("truncate", self._cutting),
            ("ftruncate", self._cutting),
            ("unlink", self._removing),
            ("remove", self._removing),
        ):
            self._original[name] = getattr(os, name)
            setattr(os, name, wrap(self._original[name]))

    def _write(self, *event: str | int) -> None:
        self._file.write(json.dumps(event) + "\n")

    def _syncing(self, really: Callable[..., Any]) -> Callable[..., None]:
        def sync(fd: Any) -> None:
            path, length = _path_of(fd), os.fstat(_number(fd)).st_size
            self._cuts.pop(path, None)
            really(fd)
            self._write("synced", path, min(length, self._cuts.pop(path, length)))

        return sync

    def _renaming(self, really: Callable[..., Any]) -> Callable[..., None]:
        def rename(old: Any, new: Any, **options: Any) -> None:
            really(old, new, **options)
            self._write("renamed", os.fspath(old), os.fspath(new))

        return rename

    def _cutting(self, really: Callable[..., Any]) -> Callable[..., None]:
        def cut(file: Any, length: int) -> None:
            path = _path_of(file)
            really(file, length)
            self._cuts[path] = min(length, self._cuts.get(path, length))
            self._write("cut", path, length)

        return cut

    def _removing(self, really: Callable[..., Any]) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            really(path, dir_fd=dir_fd)
            folder = "" if dir_fd is None else _path_of(dir_fd) + os.sep
            self._write("removed", folder + os.fspath(path), 0)

        return remove


def _number(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


def _path_of(file: Any) -> str:
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    return os.readlink(f"/proc/self/fd/{_number(file)}")


def lose_power(data_dir: Path, journal: Path, chance: random.Random) -> int:
    """After the kill: cut every file back. Returns how many bytes were lost."""
    lengths = synced_lengths(journal)
    lost = 0
    for path in [path for path in data_dir.rglob("*") if path.is_file() and path.name not in SPARED]:
        synced, size = lengths.get(str(path), 0), path.stat().st_size
        if size > synced:
            torn = chance.randrange(size - synced) if chance.random() < 0.7 else 0
            os.truncate(path, synced + torn)
            _damage(path, synced, torn, chance)
            lost += size - synced - torn
    for boot in data_dir.rglob(BOOT):
        boot.write_text(json.dumps({**json.loads(boot.read_text()), "bootId": "before the power was lost"}))
    _settle(data_dir, journal)
    return lost


def condense(journal: Path) -> None:
    """Between two lives of a process: keep what the journal says in one line per file."""
    if journal.exists():
        _rewrite(journal, synced_lengths(journal))


def synced_lengths(journal: Path) -> dict[str, int]:
    return _replayed(journal.read_text().splitlines())


def _replayed(lines: Iterable[str]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for line in lines:
        try:
            kind, path, what = json.loads(line)
        except ValueError:
            continue  # the kill tore the journal's own last line
        if kind == "synced":
            lengths[path] = what
        elif kind == "cut":
            lengths[path] = min(what, lengths.get(path, 0))
        elif kind == "removed":
            lengths.pop(path, None)
        else:
            _move(lengths, path, what)
    return lengths


def _move(lengths: dict[str, int], old: str, new: str) -> None:
    inside = [name for name in lengths if name.startswith(old + os.sep)]
    if inside:
        lengths |= {new + name[len(old) :]: lengths.pop(name) for name in inside}
    elif old in lengths:
        lengths[new] = lengths.pop(old)
    else:
        lengths.pop(new, None)  # replaced by something that was never synced


def _settle(data_dir: Path, journal: Path) -> None:
    """What is there after a power loss is on the disk."""
    files = (path for path in data_dir.rglob("*") if path.is_file())
    _rewrite(journal, {str(path): path.stat().st_size for path in files})


def _rewrite(journal: Path, lengths: dict[str, int]) -> None:
    journal.write_text("".join(json.dumps(["synced", *item]) + "\n" for item in lengths.items()))


def _damage(path: Path, synced: int, torn: int, chance: random.Random) -> None:
    """Blocks of a torn tail reach the disk in any order: some of it is zeros."""
    if torn and chance.random() < 0.5:
        with path.open("r+b") as file:
            file.seek(synced + chance.randrange(torn))
            file.write(b"\0" * chance.randrange(1, 64))
            file.truncate(synced + torn)


if __name__ == "__main__":
    SyncRecorder(Path(os.environ[JOURNAL])).install()
    from penstock.cli import main

    sys.exit(main(sys.argv[1:]))
