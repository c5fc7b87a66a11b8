"""What an operator can do about a damaged data directory while its node is stopped: list damage, verify every
batch, and accept a loss. Every function blocks.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.log import damage_file
from penstock.log.checkpoints import OffsetCheckpoints
from penstock.log.damage_file import Damage
from penstock.log.data_directory import (
    LOG_SUFFIX,
    log_dir_name,
    offset_file_name,
    parse_log_dir_name,
    parse_offset_file_name,
)
from penstock.log.log_manager import lock_data_directory
from penstock.protocol.durable_files import sync_directory


class NoKnownDamage(Exception):
    """The partition has no known damage."""


class DamageFinding(NamedTuple):
    topic: str
    partition: int
    damage: Damage


@contextmanager
def locked_directory(data_dir: Path) -> Iterator[None]:
    """Locks the folder against every other process. Raises DataDirectoryLocked, OSError."""
    fd = lock_data_directory(data_dir)
    try:
        yield
    finally:
        os.close(fd)


def list_damage(data_dir: Path) -> list[DamageFinding]:
    """Returns the damage that starts have found, accepted or not. Raises CorruptCheckpoint, OSError."""
    found = []
    for folder, topic, index in _list_partitions(data_dir):
        found += [DamageFinding(topic, index, item) for item in damage_file.load(folder)]
    return found


def accept_loss(data_dir: Path, topic: str, index: int) -> list[Damage]:
    """Makes reads skip the damage from the next start on. A missing folder starts over beyond its old end.

    Returns the accepted damage; nothing for a missing folder. Raises NoKnownDamage, DataDirectoryLocked, OSError.
    """
    folder = data_dir / log_dir_name(topic, index)
    with locked_directory(data_dir):
        if not folder.exists():
            folder.mkdir()
            damage_file.mark_given_up(folder)
            sync_directory(data_dir)
            return []
        known = damage_file.load(folder)
        refused = [item for item in known if not item.accepted]
        if not refused:
            raise NoKnownDamage(f"no known damage in {folder.name}")
        damage_file.save(folder, [item._replace(accepted=True) for item in known])
        return refused


def verify(data_dir: Path) -> Iterator[DamageFinding]:
    """Reads every batch of every partition. Yields the damage that is not known yet.

    Raises CorruptCheckpoint, OSError.
    """
    recovery_points = OffsetCheckpoints(data_dir).recovery_points
    for folder, topic, index in _list_partitions(data_dir):
        known = damage_file.load(folder)
        parsed = (parse_offset_file_name(path.name) for path in folder.glob(f"*{LOG_SUFFIX}"))
        bases = sorted(item[0] for item in parsed if item is not None)
        ends = [*bases[1:], recovery_points.get((topic, index), 0)]
        for base_offset, end_offset in zip(bases, ends, strict=True):
            for item in _verify_segment(folder, base_offset, end_offset, known):
                yield DamageFinding(topic, index, item)


def _verify_segment(folder: Path, base_offset: int, end_offset: int, known: list[Damage]) -> Iterator[Damage]:
    fd = os.open(folder / offset_file_name(base_offset, LOG_SUFFIX), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from damage_file.scan_for_damage(
            fd,
            os.fstat(fd).st_size,
            base_offset=base_offset,
            damaged_ranges=damage_file.ranges_in_segment(known, base_offset),
            end_offset=end_offset,
        )
    finally:
        os.close(fd)


def record_damage(data_dir: Path, found: Iterable[DamageFinding]) -> list[DamageFinding]:
    """Records damage below the recovery point, where the next start would not look. Only while the node is stopped.

    Damage beyond the recovery point may be a torn tail, which the start checks itself. Returns what was not recorded.
    Raises CorruptCheckpoint, OSError.
    """
    recovery_points = OffsetCheckpoints(data_dir).recovery_points
    left: list[DamageFinding] = []
    for topic, index, item in found:
        if item.start_offset < item.end_offset <= recovery_points.get((topic, index), 0):
            folder = data_dir / log_dir_name(topic, index)
            damage_file.save(folder, sorted([*damage_file.load(folder), item]))
        else:
            left.append(DamageFinding(topic, index, item))
    return left


def _list_partitions(data_dir: Path) -> Iterator[tuple[Path, str, int]]:
    for folder in sorted(data_dir.iterdir()):
        parsed = parse_log_dir_name(folder.name)
        if parsed is not None and folder.is_dir():
            yield folder, *parsed
