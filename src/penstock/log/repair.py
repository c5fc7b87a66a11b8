"""What an operator does about a damaged data folder while its node is stopped. Blocking throughout."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.log import damage
from penstock.log.checkpoints import sync_directory
from penstock.log.damage import Damage
from penstock.log.names import LOG, offset_file, parse_offset_file, parse_partition_folder, partition_folder
from penstock.log.offset_files import OffsetFiles
from penstock.log.store import lock_folder


class NothingToAccept(Exception):
    """No damage is known of the partition."""


class Finding(NamedTuple):
    topic: str
    partition: int
    damage: Damage


@contextmanager
def stopped(data_dir: Path) -> Iterator[None]:
    """Nobody else uses the folder meanwhile. Raises StoreLocked, OSError."""
    fd = lock_folder(data_dir)
    try:
        yield
    finally:
        os.close(fd)


def list_damage(data_dir: Path) -> list[Finding]:
    """What starts have found, accepted or not. Raises DamagedCheckpoint, OSError."""
    found = []
    for folder, topic, index in _partitions(data_dir):
        found += [Finding(topic, index, item) for item in damage.load(folder)]
    return found


def accept_loss(data_dir: Path, topic: str, index: int) -> list[Damage]:
    """Readers pass over the damage from the next start on; a folder that is gone is begun again beyond its end.

    Returns what was accepted; nothing for a folder that was gone. Raises NothingToAccept, StoreLocked, OSError.
    """
    folder = data_dir / partition_folder(topic, index)
    with stopped(data_dir):
        if not folder.exists():
            folder.mkdir()
            damage.give_up(folder)
            sync_directory(data_dir)
            return []
        known = damage.load(folder)
        refused = [item for item in known if not item.accepted]
        if not refused:
            raise NothingToAccept(f"no damage is known of {folder.name}")
        damage.save(folder, [item._replace(accepted=True) for item in known])
        return refused


def verify(data_dir: Path) -> Iterator[Finding]:
    """Reads every batch of every partition. Yields damage that nothing else has come across yet.

    Raises DamagedCheckpoint, OSError.
    """
    recovery_points = OffsetFiles(data_dir).recovery_points
    for folder, topic, index in _partitions(data_dir):
        known = damage.load(folder)
        parsed = (parse_offset_file(path.name) for path in folder.glob(f"*{LOG}"))
        bases = sorted(item[0] for item in parsed if item is not None)
        ends = [*bases[1:], recovery_points.get((topic, index), 0)]
        for base_offset, end_offset in zip(bases, ends, strict=True):
            for item in _verify_segment(folder, base_offset, end_offset, known):
                yield Finding(topic, index, item)


def _verify_segment(folder: Path, base_offset: int, end_offset: int, known: list[Damage]) -> Iterator[Damage]:
    fd = os.open(folder / offset_file(base_offset, LOG), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from damage.survey(
            fd,
            os.fstat(fd).st_size,
            base_offset=base_offset,
            holes=damage.holes_of(known, base_offset),
            end_offset=end_offset,
        )
    finally:
        os.close(fd)


def note(data_dir: Path, found: Iterable[Finding]) -> list[Finding]:
    """Let the next start know of damage below the recovery point, where it would not look. While the node is stopped.

    What lies beyond may be a torn tail, and the start checks it itself. Returns what was not noted.
    Raises DamagedCheckpoint, OSError.
    """
    recovery_points = OffsetFiles(data_dir).recovery_points
    left: list[Finding] = []
    for topic, index, item in found:
        if item.start_offset < item.end_offset <= recovery_points.get((topic, index), 0):
            folder = data_dir / partition_folder(topic, index)
            damage.save(folder, sorted([*damage.load(folder), item]))
        else:
            left.append(Finding(topic, index, item))
    return left


def _partitions(data_dir: Path) -> Iterator[tuple[Path, str, int]]:
    for folder in sorted(data_dir.iterdir()):
        parsed = parse_partition_folder(folder.name)
        if parsed is not None and folder.is_dir():
            yield folder, *parsed
