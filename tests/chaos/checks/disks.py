"""Compares the replicas of a partition on disk, batch by batch, after all nodes have stopped."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

HEADER = struct.Struct(">qiibI")  # base offset, length, leader epoch, magic, checksum
LENGTH_FROM = 12  # the length counts from behind itself


def batches(folder: Path) -> Iterator[tuple[int, int, int]]:
    """(base offset, leader epoch, checksum) of every batch, in order."""
    for segment in sorted(folder.glob("*.log")):
        data, at = segment.read_bytes(), 0
        while at + HEADER.size <= len(data):
            offset, length, epoch, _, checksum = HEADER.unpack_from(data, at)
            yield offset, epoch, checksum
            at += LENGTH_FROM + length


def differences(folders: Mapping[int, Path], topics: Mapping[str, int]) -> list[str]:
    """`folders` are data folders by node. What two replicas both hold must be the same, and both end alike."""
    found = []
    for topic, count in topics.items():
        for partition in range(count):
            name = f"{topic}-{partition}"
            held = {
                node: list(batches(folder / name))
                for node, folder in folders.items()
                if (folder / name).is_dir()
            }
            found += _compared(name, held)
    return found


def _compared(name: str, held: Mapping[int, list[tuple[int, int, int]]]) -> list[str]:
    if len(held) < 2:
        return []
    first, *others = held
    start = max((rows[0][0] for rows in held.values() if rows), default=0)
    wanted = [row for row in held[first] if row[0] >= start]
    found = []
    for other in others:
        rows = [row for row in held[other] if row[0] >= start]
        if rows != wanted:
            at = next(
                (n for n, pair in enumerate(zip(rows, wanted, strict=False)) if pair[0] != pair[1]), None
            )
            where = f"ends: {rows[-1:]} and {wanted[-1:]}" if at is None else f"{rows[at]} and {wanted[at]}"
            found.append(f"{name} differs between nodes {other} and {first}: {where}")
    return found
