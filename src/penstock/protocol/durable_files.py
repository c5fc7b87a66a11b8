"""Files that survive a crash whole: written, synced, and replaced in one step."""

import os
from pathlib import Path


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Makes created, renamed and removed names in a folder durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes | bytearray) -> None:
    """Writes and syncs a file, but not atomically: for files read only after a clean shutdown, or rebuilt otherwise."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fdatasync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Writes and syncs a temporary file, renames it, syncs the folder: a reader sees the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def replace_private(path: Path, data: bytes) -> None:
    """Like `replace_durably`, for a secret: at no time can another user read the file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    replace_durably(path, data)
