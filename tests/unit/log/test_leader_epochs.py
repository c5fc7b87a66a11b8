"""Leader epochs: OffsetForLeaderEpoch, truncation from both ends, and checkpoint files."""

import os

import pytest

from penstock.log import leader_epochs
from penstock.log.checkpoints import CorruptCheckpoint, read_offset_checkpoint, write_offset_checkpoint
from penstock.log.leader_epochs import LeaderEpochCache


@pytest.fixture
def cache():
    cache = LeaderEpochCache()
    for epoch, start in [(2, 10), (5, 20), (9, 30)]:
        cache.assign(epoch, start)
    return cache


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (-1, (-1, -1)),
        (0, (0, 10)),
        (2, (2, 20)),
        (4, (2, 20)),
        (5, (5, 30)),
        (8, (5, 30)),
        (9, (9, 100)),
        (10, (-1, -1)),
    ],
)
def test_the_end_of_an_epoch(cache, asked, answer):
    assert cache.end_offset_for(asked, 100) == answer


def test_nothing_is_known_of_an_empty_log():
    assert LeaderEpochCache().end_offset_for(0, 0) == (-1, -1)


def test_the_epoch_of_an_offset(cache):
    assert [cache.epoch_at(offset) for offset in (9, 10, 19, 20, 99)] == [-1, 2, 2, 5, 9]


def test_an_epoch_that_left_no_records_is_replaced(cache):
    cache.assign(11, 40)
    cache.assign(12, 40)
    assert cache.entries() == [(2, 10), (5, 20), (9, 30), (12, 40)]
    cache.assign(12, 50)
    assert cache.entries()[-1] == (12, 40)


def test_truncation_at_the_end(cache):
    cache.truncate_end(30)
    assert (cache.entries(), cache.latest) == ([(2, 10), (5, 20)], 5)
    cache.truncate_end(5)
    assert (cache.entries(), cache.latest) == ([], -1)


def test_truncation_at_the_start_keeps_the_epoch_that_is_there(cache):
    cache.truncate_start(5)
    assert cache.entries() == [(2, 10), (5, 20), (9, 30)]
    cache.truncate_start(25)
    assert cache.entries() == [(5, 25), (9, 30)]
    cache.truncate_start(30)
    assert cache.entries() == [(9, 30)]


def test_the_file_round_trips_in_kafkas_format(cache, tmp_path):
    path = tmp_path / "leader-epoch-checkpoint"
    leader_epochs.write(path, cache.entries())
    assert path.read_text() == "0\n3\n2 10\n5 20\n9 30\n"
    loaded = leader_epochs.load(path)
    assert (loaded.entries(), loaded.latest, loaded.dirty) == (cache.entries(), 9, False)


@pytest.mark.parametrize(
    "text",
    ["", "0\n", "1\n0\n", "0\n2\n0 0\n", "0\n1\n0\n", "0\n1\na b\n", "0\n2\n3 0\n2 5\n", "0\n1\n0 -4\n"],
)
def test_a_damaged_file_is_not_believed(tmp_path, text):
    path = tmp_path / "leader-epoch-checkpoint"
    path.write_text(text)
    assert leader_epochs.load(path) is None


# Checkpoints of offsets


def test_offsets_round_trip(tmp_path):
    path = tmp_path / "recovery-point-offset-checkpoint"
    offsets = {("a", 0): 5, ("a", 1): 7, ("with-dash.and_dots", 12): 2**62}
    write_offset_checkpoint(path, offsets)
    assert path.read_text().startswith("0\n3\na 0 5\n")
    assert read_offset_checkpoint(path) == offsets
    assert read_offset_checkpoint(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"0\n",
        b"0\n1\na 0\n",
        b"0\n2\na 0 1\n",
        b"7\n0\n",
        b"0\n1\na x 1\n",
        b"0\nmany\na 0 1\n",
        b"0\n1\n\xff 0 1\n",
    ],
)
def test_damaged_offsets_are_reported(tmp_path, content):
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        read_offset_checkpoint(path)


def test_a_checkpoint_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    write_offset_checkpoint(path, {("a", 0): 1})
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd)
    )

    def crash(source, target):
        assert synced == [str(path) + ".tmp"], "renamed before it was synced"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write_offset_checkpoint(path, {("a", 0): 2})
    assert read_offset_checkpoint(path) == {("a", 0): 1}
