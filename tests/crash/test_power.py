"""The simulation of power loss: which bytes are on disk according to the journal of syncs."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from tests.crash import power


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose syncs are written down from here on; returns it."""
    for name in ("fsync", "fdatasync", "rename", "replace", "truncate", "ftruncate", "unlink", "remove"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    power.SyncRecorder(tmp_path / "journal").install()
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def write(path: Path, data: bytes, *, sync: bool = True) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fdatasync(file.fileno())


def lengths(folder: Path) -> dict[str, int]:
    found = power.synced_lengths(folder.parent / "journal")
    inside = {Path(path): length for path, length in found.items() if Path(path).is_relative_to(folder)}
    return {str(path.relative_to(folder)): length for path, length in inside.items()}


def test_what_was_synced_stays_and_the_rest_is_torn(recorded: Path) -> None:
    write(recorded / "a", b"kept")
    write(recorded / "a", b"x" * 1000, sync=False)
    lost = power.lose_power(recorded, recorded.parent / "journal", random.Random(1))
    assert lost > 0
    assert (recorded / "a").stat().st_size == 1004 - lost
    assert (recorded / "a").read_bytes().startswith(b"kept")


def test_bytes_truncated_and_written_again_are_not_synced(recorded: Path) -> None:
    write(recorded / "a", b"x" * 100)
    os.truncate(recorded / "a", 40)
    write(recorded / "a", b"y" * 50, sync=False)
    assert lengths(recorded) == {"a": 40}


def test_a_file_that_is_created_again_is_not_synced(recorded: Path) -> None:
    write(recorded / "a", b"x" * 100)
    (recorded / "a").unlink()
    write(recorded / "a", b"y" * 50, sync=False)
    assert lengths(recorded) == {}


def test_lengths_follow_files_and_folders_that_move(recorded: Path) -> None:
    (recorded / "old").mkdir()
    write(recorded / "old" / "a.tmp", b"x" * 10)
    os.replace(recorded / "old" / "a.tmp", recorded / "old" / "a")
    os.rename(recorded / "old", recorded / "new")
    assert lengths(recorded) == {"new/a": 10}
    write(recorded / "unsynced", b"x", sync=False)
    os.replace(recorded / "unsynced", recorded / "new" / "a")
    assert lengths(recorded) == {}


def test_a_removed_folder_leaves_nothing(recorded: Path) -> None:
    (recorded / "gone").mkdir()
    write(recorded / "gone" / "a", b"x")
    shutil.rmtree(recorded / "gone")
    assert lengths(recorded) == {}


def test_condensing_keeps_what_the_journal_says(recorded: Path) -> None:
    journal = recorded.parent / "journal"
    for _ in range(50):
        write(recorded / "a", b"x")
    write(recorded / "b", b"x")
    before = lengths(recorded)
    power.condense(journal)
    assert lengths(recorded) == before == {"a": 50, "b": 1}
    assert len(journal.read_text().splitlines()) == 2


def test_what_survived_a_power_loss_is_on_the_disk(recorded: Path) -> None:
    journal = recorded.parent / "journal"
    write(recorded / "a", b"x" * 1000, sync=False)
    power.lose_power(recorded, journal, random.Random(3))
    size = (recorded / "a").stat().st_size
    assert size > 0
    assert lengths(recorded) == {"a": size}
    assert power.lose_power(recorded, journal, random.Random(4)) == 0


def test_a_torn_last_line_of_the_journal_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text(json.dumps(["synced", "/a", 5]) + '\n["synced", "/a"')
    assert power.synced_lengths(journal) == {"/a": 5}
