"""Copies that this node cannot vouch for: gone, damaged, or out of reach on a disk that refuses them.

The controller is told, and takes them out of the in-sync set. Only when it has, and somebody else can lead, is a
damaged copy set aside and fetched anew; the last copy there is stays where it is, however bad, for an operator.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Final

from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.state import PartitionState

logger = logging.getLogger("penstock.partitions")

_AGAIN_S: Final = 0.5

#: Topic and partition.
Key = tuple[str, int]


class Losses:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._reasons: dict[Key, str] = {}
        self._short: set[Key] = set()  # served, and not reported yet
        self._reported: set[Key] = set()
        self._is_reporting = False

    def __contains__(self, key: Key) -> bool:
        return key in self._reasons

    def __len__(self) -> int:
        return len(self._reasons.keys() | self._short)

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(self._reasons)

    def add(self, key: Key, reason: str) -> bool:
        """False when it is known already."""
        if key in self._reasons:
            return False
        self._reasons[key] = reason
        self._note(key, reason)
        return True

    def add_short(self, key: Key, reason: str) -> None:
        """Sound as far as it goes: it stays, and only has to be told."""
        self._short.add(key)
        self._note(key, reason)

    def _note(self, key: Key, reason: str) -> None:
        self._node.metrics.replicas_lost += 1
        logger.error("replica lost", extra={"partition": f"{key[0]}-{key[1]}", "reason": reason})

    def forget(self, key: Key) -> None:
        self._reasons.pop(key, None)
        self._short.discard(key)
        self._reported.discard(key)

    async def told(self) -> None:
        """Returns when the controller knows of all copies that are served: until then it would let them lead."""
        await self.report()
        while self._short:
            await asyncio.sleep(_AGAIN_S)
            await self.report()

    async def report(self) -> None:
        """Tell the controller what it does not know yet. What it does not take now is told again later."""
        keys = (self._reasons.keys() | self._short) - self._reported
        if not keys or self._is_reporting:
            return
        self._is_reporting = True
        try:
            accepted = await self._node.lifecycle.report_lost(keys)
            self._reported |= accepted & self._reasons.keys()
            self._short -= accepted
        except ApiError as error:
            logger.warning("losses not reported yet", extra={"replicas": len(keys), "reason": str(error)})
        finally:
            self._is_reporting = False

    def is_replaceable(self, key: Key, state: PartitionState) -> bool:
        """Others have everything, or an operator has chosen to go on without what is here."""
        node_id = self._node.node_id
        able = {*state.isr, *state.elr}
        if node_id not in able:
            return bool(able)
        return key in self._reported and state.leader == node_id and state.leader_recovering


def is_damage(error: ApiError) -> bool:
    """A missing or damaged file, and not a disk that is busy or full, or a process without descriptors."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOENT, errno.EIO)
    return cause is None


def is_owed(state: PartitionState, node_id: int) -> bool:
    """Whether a folder that is not there when the node starts was there before, with records that count.

    A partition that has never changed may have been created in the moment before a crash.
    """
    has_lived = (state.leader_epoch, state.partition_epoch) != (0, 0)
    return has_lived and has_peers(state) and node_id in (*state.isr, *state.elr)


def has_peers(state: PartitionState) -> bool:
    return len(state.replicas) > 1


def others_have(state: PartitionState, node_id: int) -> bool:
    """Another replica has everything that was committed."""
    return bool({*state.isr, *state.elr} - {node_id})
