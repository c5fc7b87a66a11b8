"""What the subscriptions of one application share: publishers, topics made, stores opened, figures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from penstock.client.app.failing import Letter
from penstock.client.app.figures import Figures
from penstock.client.app.publishing import NotPublished, Published, Publisher
from penstock.client.app.settings import Acks, ApplicationError, Settings, producer_settings
from penstock.client.app.subscription import Subscription
from penstock.client.app.waits import unreachable
from penstock.client.cluster import Cluster
from penstock.client.letter_topics import ensure_letters
from penstock.client.letters import DEAD_LETTER_SETTINGS, RETRY_SETTINGS, dead_letter_topic, retry_topic
from penstock.client.settings import Address, ConnectionSettings
from penstock.client.stores import StoreError, StoreUnavailable
from penstock.client.topic_contracts import LesserContract, check_topic_contracts
from penstock.client.tracing import Spans

__all__ = ["Resources"]

#: Names that the raw client knows too.
_SHARED: Final = ("security.", "ssl.", "sasl.")


#: How often who waits for brokers looks whether the application ends.
_LOOK_S: Final = 0.3
_ENDS: Final = "the application ends, and no broker has confirmed it: {}"


def now_ms() -> int:
    return round(time.time() * 1000)


class Resources:
    """Threads share it. Everything is made when it is first needed, and closed at the end."""

    def __init__(
        self,
        bootstrap: str,
        name: str,
        settings: Settings,
        acks: Mapping[str, Acks] | Acks = "all",
    ) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.settings = settings
        self.spans = Spans(client=name)
        self._lock = threading.RLock()
        self._publishers: dict[Acks, Publisher] = {}
        self._acks: Mapping[str, Acks] = acks if isinstance(acks, Mapping) else {}
        self._default_acks: Acks = "all" if isinstance(acks, Mapping) else acks
        self._opened: dict[tuple[Any, str], Any] = {}
        self._figures: dict[int, Figures] = {}
        #: Set while the application ends: nothing waits any longer for brokers that are not there.
        self.ending = threading.Event()
        self._addresses: set[Address] = set()

    def publisher(self, acks: Acks = "all") -> Publisher:
        """Another one, where the one before is of no use any more. The library has one setting for all it sends."""
        found = self._publishers.get(acks)
        if found is not None and not found.is_spent:
            return found
        with self._lock:
            found = self._publishers.get(acks)
            if found is not None and not found.is_spent:
                return found
            settings = producer_settings(self.bootstrap, self.name, self.settings, acks)
            made = Publisher(settings, self.check_ending)
            self._publishers[acks] = made
            if found is not None:
                # Elsewhere, since it tells others what became of their messages.
                threading.Thread(target=found.close, name="penstock-spent", daemon=True).start()
            return made

    def acks_of(self, topic: str) -> Acks:
        return self._acks.get(topic, self._default_acks)

    def flush(self, timeout_s: float) -> int:
        """How many messages are still on their way."""
        deadline_s = time.monotonic() + timeout_s
        return sum(
            each.flush(max(deadline_s - time.monotonic(), 0.0)) for each in list(self._publishers.values())
        )

    def post(self, letter: Letter) -> Future[Published]:
        return self.publisher().send(
            letter.topic,
            letter.value,
            key=letter.key,
            headers=letter.headers,
            partition=letter.partition,
            timestamp_ms=letter.timestamp_ms,
        )

    def opened(self, given: Any, open_it: Callable[[str], Any]) -> Any:
        """A store or ledger by its URL, once; one that the user has opened is used as it is."""
        if not isinstance(given, str):
            return given
        with self._lock:
            if (open_it, given) not in self._opened:
                try:
                    self._opened[open_it, given] = open_it(given)
                except StoreUnavailable:
                    raise
                except StoreError as flaw:
                    raise ApplicationError(str(flaw)) from flaw
            return self._opened[open_it, given]

    def addresses(self) -> list[Address]:
        """Of all brokers that were ever heard of, and those that the user named."""
        with self._lock:
            return sorted(self._addresses.union(self._connection_settings().bootstrap))

    def unreachable(self) -> str | None:
        """Why no broker answers; None where one does. A broker behind TLS is only connected to."""
        return unreachable(self.addresses(), asks=self._connection_settings().security is None)

    def await_published(self, future: Future[Published], timeout_s: float) -> Published:
        """Raises NotPublished, TimeoutError. Gives up early where the application ends and no broker answers."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return future.result(min(left_s, _LOOK_S) if left_s > 0 else 0)
            except TimeoutError:
                if left_s <= 0:
                    raise
            self.check_ending(may_be_there=True)

    def check_ending(self, *, may_be_there: bool = False) -> None:
        """Raises NotPublished where the application ends and no broker answers: nothing is waited for any longer."""
        if self.ending.is_set() and (reason := self.unreachable()) is not None:
            raise NotPublished(_ENDS.format(reason), may_be_there=may_be_there)

    async def check_ending_async(self, *, may_be_there: bool = False) -> None:
        """The same, while other tasks go on."""
        if self.ending.is_set():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, partial(self.check_ending, may_be_there=may_be_there))

    async def await_published_async(self, future: Future[Published], timeout_s: float) -> Published:
        """The same, while other tasks go on."""
        deadline_s = time.monotonic() + timeout_s
        wrapped = asyncio.wrap_future(future)
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                return await asyncio.wait_for(asyncio.shield(wrapped), min(left_s, _LOOK_S))
            except TimeoutError:
                if left_s <= 0:
                    raise
            await self.check_ending_async(may_be_there=True)

    def figures_of(self, subscription: Subscription) -> Figures:
        with self._lock:
            return self._figures.setdefault(id(subscription), Figures())

    def cluster(self) -> Cluster:
        """For one thread, and to be closed."""
        return Cluster(self._connection_settings())

    def _connection_settings(self) -> ConnectionSettings:
        shared = {name: value for name, value in self.settings.items() if name.startswith(_SHARED)}
        return ConnectionSettings.parse({"bootstrap.servers": self.bootstrap, **shared})

    def letter_topics(self, subscription: Subscription) -> dict[str, int]:
        """Made where they are missing; with their partitions. Raises ApplicationError, Unavailable, Refused."""
        made: dict[str, int] = {}
        cluster = self.cluster()
        try:
            found = cluster.topics(subscription.topics)
            self._check_contracts(cluster, subscription, found)
            with self._lock:
                self._addresses.update(node.address for node in cluster.known_nodes())
            for topic in subscription.topics:
                if topic not in found:
                    raise ApplicationError(f"there is no topic {topic}; app.create_topic makes one")
                for level in range(1, subscription.levels + 1):
                    name = retry_topic(topic, level)
                    made[name] = ensure_letters(cluster, name, found[topic], RETRY_SETTINGS)
                if subscription.dead_letters:
                    name = dead_letter_topic(topic)
                    made[name] = ensure_letters(cluster, name, found[topic], DEAD_LETTER_SETTINGS)
        finally:
            cluster.close()
        return made

    def _check_contracts(self, cluster: Cluster, subscription: Subscription, topics: Iterable[str]) -> None:
        """Raises ApplicationError."""
        try:
            check_topic_contracts(cluster, topics, str(subscription.delivery), who=subscription.name)
        except LesserContract as flaw:
            raise ApplicationError(str(flaw)) from None

    def close(self, timeout_s: float) -> int:
        """How many messages were given up. Brokers that do not answer are not waited for."""
        with self._lock:
            if self._publishers and self.flush(_LOOK_S) and self.unreachable():
                timeout_s = 0.0
            left = sum(each.close(timeout_s) for each in self._publishers.values())
            self._publishers.clear()
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()
        return left
