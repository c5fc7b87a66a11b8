"""Small files that must survive a power cut: Kafka's text checkpoints, written whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

PartitionKey = tuple[str, int]


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what we or Kafka would have written."""


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable: created, renamed and removed files alike."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes | bytearray) -> None:
    """Write a file that is only read after a clean end, or rebuilt: synced, but not atomic."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fdatasync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename, fsync of the folder: a reader sees the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_checkpoint(path: Path, rows: Iterable[str], version: int = 0) -> None:
    lines = list(rows)
    replace_durably(path, "".join(f"{line}\n" for line in (version, len(lines), *lines)).encode())


def read_checkpoint(path: Path, version: int = 0) -> list[str]:
    """The rows; none when there is no such file. Raises DamagedCheckpoint."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{path} is no text: {error}") from None
    if len(lines) < 2:
        raise DamagedCheckpoint(f"{path} is cut short")
    if lines[0] != str(version):
        raise DamagedCheckpoint(f"{path} has version {lines[0]!r}, expected {version}")
    if lines[1] != str(len(lines) - 2):
        raise DamagedCheckpoint(f"{path} promises {lines[1]!r} rows and has {len(lines) - 2}")
    return lines[2:]


def write_offsets(path: Path, offsets: Mapping[PartitionKey, int]) -> None:
    write_checkpoint(
        path, (f"{topic} {index} {offset}" for (topic, index), offset in sorted(offsets.items()))
    )


def read_offsets(path: Path) -> dict[PartitionKey, int]:
    """Offsets by partition. Raises DamagedCheckpoint."""
    offsets: dict[PartitionKey, int] = {}
    for row in read_checkpoint(path):
        try:
            topic, index, offset = row.split(" ")
            offsets[topic, int(index)] = int(offset)
        except ValueError:
            raise DamagedCheckpoint(f"{path} has a malformed row: {row!r}") from None
    return offsets
