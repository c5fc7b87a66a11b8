"""Resources that the subscriptions of one application share: publishers, open stores and ledgers, and counters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from penstock.client.app.broker_watch import BrokerWatch, uses_tls
from penstock.client.app.failures import FailureRecord
from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import Acks, ApplicationError, Settings, producer_settings
from penstock.client.app.overflow import BLOCK, DROP_OLDEST, PublishCounters, PublishFigures, Rule
from penstock.client.app.publisher import Published, Publisher
from penstock.client.app.subscription import Subscription
from penstock.client.app.wait_reporter import probe_brokers
from penstock.client.deadletters.headers import (
    DEAD_LETTER_SETTINGS,
    RETRY_SETTINGS,
    dead_letter_topic,
    retry_topic,
)
from penstock.client.deadletters.topics import ensure_failure_topic
from penstock.client.errors import NotPublished
from penstock.client.stores import StoreError, StoreUnavailable
from penstock.client.tracing import Spans
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import SECURITY_PREFIXES, Address, ConnectionSettings
from penstock.client.wire.topics import InsufficientContract, check_topic_contracts

__all__ = ["Resources"]

#: How often a thread that waits for brokers checks whether the application ends.
_STOP_CHECK_S: Final = 0.3
_STOPPING_TEXT: Final = "the application stops, and no broker has confirmed the message: {}"


def now_ms() -> int:
    return round(time.time() * 1000)


class Resources:
    """Opens each resource at its first use and closes all at the end. Threads share it."""

    def __init__(
        self,
        bootstrap: str,
        name: str,
        settings: Settings,
        acks: Mapping[str, Acks] | Acks = "all",
        overflow: Mapping[str, Rule] | Rule = BLOCK,
    ) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.watch = BrokerWatch(settings)
        #: Settings of the user come last: with statistics of their own, silent brokers are not reported.
        self.settings = {**self.watch.client_settings(), **settings}
        self.spans = Spans(client=name)
        self._lock = threading.RLock()
        self._publishers: dict[tuple[Acks, bool], Publisher] = {}
        self._publish_counters = PublishCounters()
        self._acks: Mapping[str, Acks] = acks if isinstance(acks, Mapping) else {}
        self._default_acks: Acks = "all" if isinstance(acks, Mapping) else acks
        self._overflow: Mapping[str, Rule] = overflow if isinstance(overflow, Mapping) else {}
        self._default_overflow = BLOCK if isinstance(overflow, Mapping) else overflow
        self._opened: dict[tuple[Any, str], Any] = {}
        self._figures: dict[int, Figures] = {}
        #: Set while the application ends: then no thread waits for unreachable brokers any longer.
        self.ending = threading.Event()
        self._addresses: set[Address] = set()

    def publisher(self, acks: Acks = "all", rule: Rule = BLOCK) -> Publisher:
        """Returns the publisher for `acks` and the overflow rule, and replaces one that is spent.

        Each value of `acks` has a publisher of its own, because a producer of librdkafka has one setting for all
        topics; so has drop-oldest, because it divides the buffer.
        """
        drops_oldest = rule.policy == DROP_OLDEST
        found = self._publishers.get((acks, drops_oldest))
        if found is not None and not found.is_spent:
            return found
        with self._lock:
            found = self._publishers.get((acks, drops_oldest))
            if found is not None and not found.is_spent:
                return found
            settings = producer_settings(self.bootstrap, self.name, self.settings, acks)
            made = Publisher(settings, self.check_ending, self._publish_counters, drops_oldest=drops_oldest)
            self._publishers[acks, drops_oldest] = made
            if found is not None:
                # In another thread, because close() runs the callbacks of other messages.
                threading.Thread(target=found.close, name="penstock-spent", daemon=True).start()
            return made

    def acks_of(self, topic: str) -> Acks:
        return self._acks.get(topic, self._default_acks)

    def overflow_of(self, topic: str) -> Rule:
        return self._overflow.get(topic, self._default_overflow)

    def publish_figures(self) -> PublishFigures:
        return self._publish_counters.figures(sum(each.waiting for each in list(self._publishers.values())))

    def flush(self, timeout_s: float) -> int:
        """Waits for unconfirmed messages; returns how many are left."""
        deadline_s = time.monotonic() + timeout_s
        return sum(
            each.flush(max(deadline_s - time.monotonic(), 0.0)) for each in list(self._publishers.values())
        )

    def publish_failure(self, record: FailureRecord) -> Future[Published]:
        return self.publisher().send(record.draft())

    def opened(self, given: Any, open_it: Callable[[str], Any]) -> Any:
        """Returns a store or ledger: opens each URL once, and returns an object that the user has opened as it is."""
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
        """The addresses of all brokers that the cluster ever reported, and of the bootstrap brokers."""
        with self._lock:
            return sorted(self._addresses.union(self._connection_settings().bootstrap))

    def unreachable(self) -> str | None:
        """Returns why no broker answers, or None if one does."""
        return probe_brokers(self.addresses(), uses_tls=uses_tls(self.settings))

    def await_published(self, future: Future[Published], timeout_s: float) -> Published:
        """Waits until a message is published. Raises NotPublished, TimeoutError.

        Stops early if the application ends and no broker answers.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return future.result(min(left_s, _STOP_CHECK_S) if left_s > 0 else 0)
            except TimeoutError:
                if left_s <= 0:
                    raise
            self.check_ending(may_be_there=True)

    def check_ending(self, *, may_be_there: bool = False) -> None:
        """Raises NotPublished if the application ends and no broker answers: waiting longer is of no use."""
        if self.ending.is_set() and (reason := self.unreachable()) is not None:
            raise NotPublished(_STOPPING_TEXT.format(reason), may_be_there=may_be_there)

    async def check_ending_async(self, *, may_be_there: bool = False) -> None:
        """Does the same as `check_ending` while other tasks keep running."""
        if self.ending.is_set():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, partial(self.check_ending, may_be_there=may_be_there))

    async def await_published_async(self, future: Future[Published], timeout_s: float) -> Published:
        """Does the same as `await_published` while other tasks keep running."""
        deadline_s = time.monotonic() + timeout_s
        wrapped = asyncio.wrap_future(future)
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                return await asyncio.wait_for(asyncio.shield(wrapped), min(left_s, _STOP_CHECK_S))
            except TimeoutError:
                if left_s <= 0:
                    raise
            await self.check_ending_async(may_be_there=True)

    def figures_of(self, subscription: Subscription) -> Figures:
        with self._lock:
            return self._figures.setdefault(id(subscription), Figures())

    def cluster(self) -> Cluster:
        """Opens a connection to the cluster for one thread; the caller closes it."""
        return Cluster(self._connection_settings())

    def _connection_settings(self) -> ConnectionSettings:
        shared = {name: value for name, value in self.settings.items() if name.startswith(SECURITY_PREFIXES)}
        return ConnectionSettings.parse({"bootstrap.servers": self.bootstrap, **shared})

    def ensure_failure_topics(self, subscription: Subscription) -> dict[str, int]:
        """Creates missing retry and dead-letter topics; returns the number of partitions of each.

        Raises ApplicationError, Unavailable, Refused.
        """
        made: dict[str, int] = {}
        with self.cluster() as cluster:
            found = cluster.topics(subscription.topics)
            self._check_contracts(cluster, subscription, found)
            with self._lock:
                self._addresses.update(node.address for node in cluster.known_nodes())
            for topic in subscription.topics:
                if topic not in found:
                    raise ApplicationError(f"there is no topic {topic}; create it with app.create_topic")
                for level in range(1, subscription.levels + 1):
                    name = retry_topic(topic, level)
                    made[name] = ensure_failure_topic(cluster, name, found[topic], RETRY_SETTINGS)
                if subscription.dead_letters:
                    name = dead_letter_topic(topic)
                    made[name] = ensure_failure_topic(cluster, name, found[topic], DEAD_LETTER_SETTINGS)
        return made

    def _check_contracts(self, cluster: Cluster, subscription: Subscription, topics: Iterable[str]) -> None:
        """Raises ApplicationError."""
        try:
            check_topic_contracts(cluster, topics, str(subscription.delivery), who=subscription.name)
        except InsufficientContract as flaw:
            raise ApplicationError(str(flaw)) from None

    def close(self, timeout_s: float) -> int:
        """Closes everything; returns how many messages were abandoned. Does not wait for unreachable brokers."""
        self.watch.end()
        with self._lock:
            if self._publishers and self.flush(_STOP_CHECK_S) and self.unreachable():
                timeout_s = 0.0
            left = sum(each.close(timeout_s) for each in self._publishers.values())
            self._publishers.clear()
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()
        return left
