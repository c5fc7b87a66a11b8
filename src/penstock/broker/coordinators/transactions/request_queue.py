"""Questions about partitions on their way to one broker: what comes up during one request goes with the next."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.broker.broker_calls import ask_broker
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.transactions")

Outcomes = dict[TopicPartition, ErrorCode]


class Entry(Protocol):
    @property
    def key(self) -> Hashable:
        """Whose partitions these are, as the response names it."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]: ...
    @property
    def outcomes(self) -> asyncio.Future[Outcomes]: ...


EntryT = TypeVar("EntryT", bound=Entry)
#: What a response says about each key's partitions.
Told = dict[tuple[Hashable, TopicPartition], ErrorCode]


class Outbox(ABC, Generic[EntryT]):
    _API_KEY: int
    #: A connection of its own for each, so that they do not wait for each other.
    _PURPOSE: str
    _TIMEOUT_S: float

    def __init__(self, node: Node, broker_id: int) -> None:
        self._node = node
        self._broker_id = broker_id
        self._waiting: list[EntryT] = []
        self._sending: asyncio.Task[None] | None = None

    @abstractmethod
    def _take(self) -> list[EntryT]:
        """Those of the waiting that go next; the others stay."""

    @abstractmethod
    def _request(self, entries: list[EntryT]) -> Any: ...

    @abstractmethod
    def _told(self, response: Any) -> Told:
        """Raises ApiError for what the response says of all of it."""

    async def ask(self, entry: EntryT) -> Outcomes:
        """What the broker says of each partition; NETWORK_EXCEPTION where nobody knows."""
        self._waiting.append(entry)
        if self._sending is None:
            self._sending = self._node.spawn(self._send())
        return await entry.outcomes

    async def _send(self) -> None:
        try:
            while self._waiting:
                entries = self._take()
                if entries:
                    self._answer(entries, *await self._ask_together(entries))
        finally:
            self._sending = None

    async def _ask_together(self, entries: list[EntryT]) -> tuple[Told, ErrorCode]:
        """What was told, and what is to be said where nothing was."""
        try:
            response = await ask_broker(
                self._node,
                self._broker_id,
                self._API_KEY,
                self._request(entries),
                timeout_s=self._TIMEOUT_S,
                purpose=self._PURPOSE,
            )
            return self._told(response), ErrorCode.unknown_topic_or_partition
        except ApiError as error:
            return {}, error.code
        except Exception:
            # Somebody waits for each of them, and those behind them too.
            logger.exception("no answer could be made out of broker %d's", self._broker_id)
            return {}, ErrorCode.network_exception

    def _answer(self, entries: list[EntryT], told: Told, default: ErrorCode) -> None:
        for entry in entries:
            # The one who asked may have gone away meanwhile.
            if not entry.outcomes.done():
                entry.outcomes.set_result(
                    {each: told.get((entry.key, each), default) for each in entry.partitions}
                )
