"""Transactions that one process has written and another one ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import Fenced
from penstock.client.metadata import Place
from penstock.client.sequencing import Producer
from penstock.client.transactions import EPOCH_PER_TRANSACTION, describe_transaction, end_transaction

_ABORTED: Final = ("PrepareAbort", "CompleteAbort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that is needed to end it, from anywhere. Everything in it was acknowledged."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: tuple[Place, ...]
    #: Groups whose offsets are committed with it.
    groups: tuple[str, ...] = ()
    transaction_version: int = EPOCH_PER_TRANSACTION

    @property
    def is_empty(self) -> bool:
        """Nothing was written, so that there is nothing to end."""
        return not self.partitions and not self.groups


def end_prepared(cluster: Cluster, prepared: Prepared, *, commit: bool) -> None:
    """Commit or abort it. It is no error where it has ended that way already, however often this is asked.

    Raises Refused (INVALID_TXN_STATE) where it ended the other way; Fenced where it was aborted, because it took too
    long or its id was taken over, and is to be committed; Unavailable where this is to be asked again.
    """
    if prepared.is_empty:
        return
    producer = Producer(prepared.producer_id, prepared.epoch)
    try:
        end_transaction(
            cluster,
            prepared.transactional_id,
            producer,
            commit=commit,
            version=prepared.transaction_version,
        )
    except Fenced:
        if commit or not _was_aborted(cluster, prepared):
            raise


def _was_aborted(cluster: Cluster, prepared: Prepared) -> bool:
    """The coordinator aborts with the epoch above the transaction's own, so that its producer is fenced."""
    info = describe_transaction(cluster, prepared.transactional_id)
    if info is None or info.state not in _ABORTED:
        return False
    return info.producer == Producer(prepared.producer_id, prepared.epoch + 1)
