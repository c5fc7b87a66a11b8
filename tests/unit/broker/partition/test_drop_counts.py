"""The file that keeps how many records were dropped."""

import errno
import logging
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.broker.partition import drop_counts
from penstock.broker.partition.drop_counts import DROP_COUNTS_FILE, DropLedger
from penstock.security.overflow import DroppedBy, DropReason

KEY = (UUID(int=7), 3)


def ledger_with(folder: Path) -> DropLedger:
    ledger = DropLedger(folder)
    ledger.add(KEY, DroppedBy.SHED, DropReason.DISK, 5)
    ledger.add(KEY, DroppedBy.SHED, DropReason.DISK, 2)
    ledger.add(KEY, DroppedBy.DROP_OLDEST, DropReason.BYTES, 1 << 40)
    return ledger


def test_counts_are_read_back(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path)
    assert ledger.is_dirty
    ledger.save(ledger.rows())
    assert not ledger.is_dirty
    assert DropLedger(tmp_path).of(*KEY) == {
        (DroppedBy.SHED, DropReason.DISK): 7,
        (DroppedBy.DROP_OLDEST, DropReason.BYTES): 1 << 40,
    }


def test_a_failed_save_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    ledger = ledger_with(tmp_path)
    monkeypatch.setattr(drop_counts, "write_checkpoint", fail)
    with pytest.raises(OSError, match="full"):
        ledger.save(ledger.rows())
    assert ledger.is_dirty


def test_deleted_topics_are_forgotten(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path)
    ledger.save(ledger.rows())
    ledger.keep(lambda topic_id: True)
    assert not ledger.is_dirty
    ledger.keep(lambda topic_id: False)
    assert ledger.is_dirty
    assert not ledger.of(*KEY)


@pytest.mark.parametrize("damage", ["shed disk", "shed disk x", "gone disk 1", "shed disk 1 1"])
def test_a_damaged_file_does_not_keep_the_node_from_starting(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DROP_COUNTS_FILE).write_text(f"0\n1\n{UUID(int=7)} 3 {damage}\n")
    with caplog.at_level(logging.ERROR):
        assert not DropLedger(tmp_path).of(*KEY)
    assert "are lost" in caplog.text
