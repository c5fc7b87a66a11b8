"""A queue of requests about partitions to one broker.

Entries that are queued while a request is in flight go into the next request.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.environment import Tasks
    from penstock.broker.network.requests import BrokerCalls

logger = logging.getLogger("penstock.transactions")

PartitionErrors = dict[TopicPartition, ErrorCode]


class QueuedRequest(Protocol):
    @property
    def key(self) -> Hashable:
        """Identifies the owner of the partitions, as in the response."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]: ...
    @property
    def outcomes(self) -> asyncio.Future[PartitionErrors]: ...


QueuedRequestT = TypeVar("QueuedRequestT", bound=QueuedRequest)
#: The error codes in a response, by key and partition.
ErrorsByKey = dict[tuple[Hashable, TopicPartition], ErrorCode]


class BrokerRequestQueue(ABC, Generic[QueuedRequestT]):
    _API_KEY: int
    #: Each purpose has its own connection, so that requests do not wait for those of another purpose.
    _PURPOSE: str
    _TIMEOUT_S: float

    def __init__(self, broker_id: int, brokers: BrokerCalls, tasks: Tasks) -> None:
        self._broker_id = broker_id
        self._brokers = brokers
        self._tasks = tasks
        self._waiting: list[QueuedRequestT] = []
        self._sending: asyncio.Task[None] | None = None

    @abstractmethod
    def _take(self) -> list[QueuedRequestT]:
        """Remove and return the waiting entries that go into the next request."""

    @abstractmethod
    def _request(self, entries: list[QueuedRequestT]) -> Any: ...

    @abstractmethod
    def _errors_in(self, response: Any) -> ErrorsByKey:
        """Read the error codes of a response. Raises ApiError if the response has an error for all of it."""

    async def ask(self, entry: QueuedRequestT) -> PartitionErrors:
        """Returns the broker's error code for each partition; NETWORK_EXCEPTION if the outcome is unknown."""
        self._waiting.append(entry)
        if self._sending is None:
            self._sending = self._tasks.spawn(self._send())
        return await entry.outcomes

    async def _send(self) -> None:
        try:
            while self._waiting:
                entries = self._take()
                if entries:
                    self._answer(entries, *await self._ask_together(entries))
        finally:
            self._sending = None

    async def _ask_together(self, entries: list[QueuedRequestT]) -> tuple[ErrorsByKey, ErrorCode]:
        """Returns the error codes of the response, and the code for partitions that it does not contain."""
        try:
            response = await self._brokers.call(
                self._broker_id,
                self._API_KEY,
                self._request(entries),
                timeout_s=self._TIMEOUT_S,
                purpose=self._PURPOSE,
            )
            return self._errors_in(response), ErrorCode.unknown_topic_or_partition
        except ApiError as error:
            return {}, error.code
        except Exception:
            # A caller waits for each entry, and more entries wait behind these.
            logger.exception("the reply of broker %d cannot be read", self._broker_id)
            return {}, ErrorCode.network_exception

    def _answer(self, entries: list[QueuedRequestT], errors: ErrorsByKey, default: ErrorCode) -> None:
        for entry in entries:
            # The requester may have gone away in the meantime.
            if not entry.outcomes.done():
                entry.outcomes.set_result(
                    {each: errors.get((entry.key, each), default) for each in entry.partitions}
                )
