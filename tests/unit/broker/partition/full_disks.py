"""Disks that tests fill: a real file system of a few megabytes, or calls that fail as they would on a full one."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_DISK_BYTES = 8 << 20


class MountedDisk:
    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        fd = os.open(self._filler, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while os.write(fd, bytes(size)):
                    pass
        os.close(fd)

    def free(self) -> None:
        self._filler.unlink()


class PatchedDisk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_full = False
        real_open = os.open

        def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if self._is_full and flags & os.O_CREAT and not os.path.exists(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return real_open(path, flags, *args, **options)

        monkeypatch.setattr(os, "open", open_file)
        self._refuse(monkeypatch, os, "pwrite")
        self._refuse(monkeypatch, os, "write")
        self._refuse(monkeypatch, Path, "mkdir")

    def _refuse(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if self._is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    def fill(self) -> None:
        self._is_full = True

    def free(self) -> None:
        self._is_full = False


Disk = MountedDisk | PatchedDisk


@pytest.fixture(params=["mounted", "patched"])
def disk(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "patched":
        yield PatchedDisk(monkeypatch)
        return
    folder = tmp_path / "data"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield MountedDisk(folder)
    subprocess.run(["umount", str(folder)], check=True)
