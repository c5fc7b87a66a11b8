"""Taking a snapshot of the metadata, and letting go of the log that it makes unnecessary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.broker.quorum import snapshots
from penstock.raft.values import OffsetAndEpoch

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.image import ClusterImage

logger = logging.getLogger("penstock.quorum")


async def take_snapshot(node: Node, image: ClusterImage, offset: int, *, last_timestamp_ms: int) -> None:
    """Of all up to and with `offset`. Raises OSError."""
    driver = node.quorum.driver
    log, previous = driver.log, driver.view.snapshot
    id = OffsetAndEpoch(offset + 1, log.epochs.epoch_at(offset))
    if previous is not None and previous >= id:
        return
    await node.in_thread(
        snapshots.take,
        log.directory,
        id,
        image,
        driver.core.voters.as_of(id.offset),
        last_timestamp_ms=last_timestamp_ms,
        now_ms=node.now_ms(),
    )
    logger.info("metadata snapshot taken", extra={"offset": id.offset, "epoch": id.epoch})
    node.quorum.snapshot_taken(id)
    if previous is not None:
        await _let_go_before(node, previous)


async def _let_go_before(node: Node, kept: OffsetAndEpoch) -> None:
    """One snapshot and the log since then stay, so that a replica a little behind need not fetch a whole one."""
    log = node.quorum.driver.log
    if kept.offset > log.end_offset:
        return  # another snapshot was installed meanwhile
    log.delete_records_before(kept.offset)
    expired = await node.in_thread(log.expired_segments, node.now_ms(), kept.offset)
    files = log.remove_segments(expired, node.now_ms(), end_offset=log.end_offset) if expired else []
    await node.in_thread(_clean_up, node, log.directory, kept, files)


def _clean_up(node: Node, folder: Path, kept: OffsetAndEpoch, files: list[Path]) -> None:
    """The log's start is durable before the snapshots that it rests on are gone."""
    node.store.checkpoint()
    snapshots.remove(folder, (id for id in snapshots.stored(folder) if id < kept))
    for path in files:
        path.unlink(missing_ok=True)
