"""Members of share groups: they fetch, take their time, and say what became of each record, or nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.groups.share.partition.share_partition_state import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    AcknowledgementBatch,
    AcquiredBatch,
)
from penstock.protocol.errors import ErrorCode
from simulation.clients import Sleeper
from simulation.script import Ask, Steps, play
from simulation.sharing import ShareAck, ShareFetch

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.replica import Key

_OUTCOMES: Final = (*[ACCEPT] * 12, RELEASE, RELEASE, RELEASE, REJECT, RENEW, None, None)


class ShareMember(Sleeper):
    def __init__(self, cluster: Cluster, id: int, counts: Counter[str], group: str) -> None:
        super().__init__(cluster, id, counts)
        self.group = group
        self.member = f"s{self.world.serial()}"
        self.is_over = False
        self.is_leaving = False
        #: From here on it only accepts.
        self.is_diligent = False
        self._holds = False

    def __repr__(self) -> str:
        return f"<ShareMember {self.member} of {self.group}>"

    @property
    def is_busy(self) -> bool:
        return self._holds and not self.is_over

    def begin(self, keys: list[Key]) -> None:
        play(self, self._live(keys))

    def crash(self) -> None:
        self.life.is_over = self.is_over = True

    def _live(self, keys: list[Key]) -> Steps:
        while not self.is_leaving:
            key = keys[self.world.draw(len(keys))]
            fetch = ShareFetch(key, self.group, self.member, self.world.between(1, 4))
            reply = yield Ask(key, "share_fetch", fetch)
            acquired = [] if reply is None else reply[1]
            if not acquired:
                yield self.world.between(5, 40)
                continue
            self._holds = True
            self.counts["records received"] += sum(last - first + 1 for first, last, _ in acquired)
            yield from self._work(key, acquired)
            self._holds = False
        for key in keys:
            yield Ask(key, "share_ack", ShareAck(key, self.group, self.member, ()))
        self.is_over = True

    def _work(self, key: Key, acquired: list[AcquiredBatch]) -> Steps:
        """What is renewed is worked on once more."""
        left = [offset for first, last, _ in acquired for offset in range(first, last + 1)]
        while left:
            is_slow = not self.is_diligent and self.world.chance(0.15)
            yield self.world.between(50, 250) if is_slow else self.world.between(1, 20)
            said = {offset: self._outcome() for offset in left}
            batches = tuple(
                AcknowledgementBatch(offset, offset, bytes((kind,)))
                for offset, kind in said.items()
                if kind is not None
            )
            if not batches:
                return
            is_heard = yield from self._say(ShareAck(key, self.group, self.member, batches))
            left = [offset for offset, kind in said.items() if kind == RENEW and is_heard]

    def _outcome(self) -> int | None:
        return ACCEPT if self.is_diligent else _OUTCOMES[self.world.draw(len(_OUTCOMES))]

    def _say(self, ack: ShareAck) -> Steps:
        """It says so again if it hears nothing, as clients do."""
        for _ in range(2):
            reply = yield Ask(ack.key, "share_ack", ack)
            if reply is not None:
                if reply[0] is ErrorCode.none:
                    self.counts["outcomes told"] += len(ack.batches)
                return reply[0] is ErrorCode.none
            yield self.backoff_ms
        return False
