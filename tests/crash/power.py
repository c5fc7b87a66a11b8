"""Power loss for a real broker process: what was synced stays, what was not may be torn or gone.

`kill -9` keeps the page cache, so it proves nothing about fsync. Here the broker runs with `os.fsync` and
`os.fdatasync` wrapped to write down how long each file was when a sync of it began. After the kill every file is cut
back to that length, plus a torn piece of what followed.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

JOURNAL = "CRASH_JOURNAL"


def record_syncs(journal: Path) -> None:
    """In the broker's process: note the length of each file once a sync that covers it has returned."""
    file = journal.open("a", buffering=1)
    really = {name: getattr(os, name) for name in ("fsync", "fdatasync", "rename", "replace")}

    def syncing(name: str) -> Any:
        def sync(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            path, length = os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_size
            really[name](fd)
            file.write(json.dumps(["synced", path, length]) + "\n")

        return sync

    def renaming(name: str) -> Any:
        def rename(old: Any, new: Any, **options: Any) -> None:
            really[name](old, new, **options)
            file.write(json.dumps(["renamed", os.fspath(old), os.fspath(new)]) + "\n")

        return rename

    for name in ("fsync", "fdatasync"):
        setattr(os, name, syncing(name))
    for name in ("rename", "replace"):
        setattr(os, name, renaming(name))


def lose_power(data_dir: Path, journal: Path, chance: random.Random) -> int:
    """After the kill: cut every file back. Returns how many bytes were lost."""
    lengths = _synced_lengths(journal)
    lost = 0
    for path in [path for path in data_dir.rglob("*") if path.is_file() and path.name != ".lock"]:
        synced, size = lengths.get(str(path), 0), path.stat().st_size
        if size > synced:
            torn = chance.randrange(size - synced) if chance.random() < 0.7 else 0
            os.truncate(path, synced + torn)
            _damage(path, synced, torn, chance)
            lost += size - synced - torn
    return lost


def _synced_lengths(journal: Path) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for line in journal.read_text().splitlines():
        try:
            kind, path, what = json.loads(line)
        except ValueError:
            continue  # the kill tore the journal's own last line
        if kind == "synced":
            lengths[path] = what
        elif Path(what).is_dir() or any(name.startswith(path + os.sep) for name in lengths):
            moved = {name: lengths.pop(name) for name in list(lengths) if name.startswith(path + os.sep)}
            lengths |= {what + name[len(path) :]: length for name, length in moved.items()}
        elif path in lengths:
            lengths[what] = lengths.pop(path)
    return lengths


def _damage(path: Path, synced: int, torn: int, chance: random.Random) -> None:
    """Blocks of a torn tail reach the disk in any order: some of it is zeros."""
    if torn and chance.random() < 0.5:
        with path.open("r+b") as file:
            file.seek(synced + chance.randrange(torn))
            file.write(b"\0" * chance.randrange(1, 64))
            file.truncate(synced + torn)


if __name__ == "__main__":
    record_syncs(Path(os.environ[JOURNAL]))
    from penstock.cli import main

    sys.exit(main(sys.argv[1:]))
