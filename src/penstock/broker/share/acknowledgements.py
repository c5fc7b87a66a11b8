"""The acknowledgements of one request: carried out at once, answered when they are stored."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from penstock.broker.share.sessions import Place
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.share.table import SharePartitions
    from penstock.protocol.share import Topic


class Outcome(NamedTuple):
    error: ErrorCode = ErrorCode.none
    message: str | None = None


class Acknowledgements:
    def __init__(
        self, shares: SharePartitions, group: str, member: str, topics: list[Topic], *, may_renew: bool
    ) -> None:
        """In the order of the request: each is carried out before the next one is looked at."""
        self.outcomes: dict[Place, Outcome] = {}
        self._stored: dict[Place, asyncio.Future[None]] = {}
        for topic_id, partitions in topics:
            for index, batches in partitions:
                if not batches:
                    continue
                place = (topic_id, index)
                try:
                    led = shares.get(group, place)
                    if led is None:
                        raise ApiError(ErrorCode.invalid_record_state, "nobody holds records here")
                    stored = led.acknowledge(member, batches, may_renew=may_renew)
                except ApiError as error:
                    self._failed(shares, place, error)
                    continue
                self.outcomes[place] = Outcome()
                if stored is not None:
                    self._stored[place] = stored

    @staticmethod
    def _outcome(error: ApiError) -> Outcome:
        return Outcome(error.code, error.message)

    def _failed(self, shares: SharePartitions, place: Place, error: ApiError) -> None:
        shares.node.metrics.count_error("share_acknowledge", error.code.name)
        self.outcomes[place] = self._outcome(error)

    @property
    def is_waiting(self) -> bool:
        return bool(self._stored)

    async def stored(self) -> None:
        """Afterwards the outcomes are known."""
        for place, future in self._stored.items():
            try:
                await asyncio.shield(future)
            except ApiError as error:
                self.outcomes[place] = self._outcome(error)


async def all_stored(futures: list[asyncio.Future[None]]) -> None:
    """However it ends: whoever says goodbye does not care."""
    if futures:
        await asyncio.wait(futures)
