"""Replicas are compared batch by batch, from where all of them begin to where all of them must end."""

import struct
from pathlib import Path

from tests.chaos.checks.disks import differences

TOPICS = {"t": 1}


def write(folder: Path, node: int, *batches: tuple[int, int, int], segment: int = 0) -> Path:
    """Batches of (base offset, leader epoch, checksum) with a payload of no interest."""
    partition = folder / f"node-{node}" / "t-0"
    partition.mkdir(parents=True, exist_ok=True)
    with (partition / f"{segment:020}.log").open("ab") as file:
        for offset, epoch, checksum in batches:
            file.write(struct.pack(">qiibI", offset, 49, epoch, 2, checksum) + bytes(40))
    return folder / f"node-{node}"


def test_equal_replicas_pass_however_they_are_cut_into_segments(tmp_path: Path) -> None:
    one = write(tmp_path, 1, (0, 1, 11), (5, 1, 12), (9, 2, 13))
    write(tmp_path, 2, (0, 1, 11))
    two = write(tmp_path, 2, (5, 1, 12), (9, 2, 13), segment=5)
    assert differences({1: one, 2: two}, TOPICS) == []


def test_a_replica_may_begin_later(tmp_path: Path) -> None:
    one = write(tmp_path, 1, (0, 1, 11), (5, 1, 12))
    two = write(tmp_path, 2, (5, 1, 12), segment=5)
    assert differences({1: one, 2: two}, TOPICS) == []


def test_another_record_or_epoch_or_end_is_found(tmp_path: Path) -> None:
    one = write(tmp_path, 1, (0, 1, 11), (5, 1, 12))
    for node, other in ((2, (5, 1, 99)), (3, (5, 2, 12)), (4, (6, 1, 12))):
        assert len(differences({1: one, node: write(tmp_path, node, (0, 1, 11), other)}, TOPICS)) == 1
    assert len(differences({1: one, 5: write(tmp_path, 5, (0, 1, 11))}, TOPICS)) == 1
    assert len(differences({1: one, 6: write(tmp_path, 6)}, TOPICS)) == 1
