"""What the subscriptions of one application share: publishers, topics made, stores opened, figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from penstock.client.app.failing import Letter
from penstock.client.app.figures import Figures
from penstock.client.app.publishing import Published, Publisher
from penstock.client.app.settings import ApplicationError, Settings, producer_settings
from penstock.client.app.subscription import Subscription
from penstock.client.cluster import Cluster
from penstock.client.letter_topics import ensure_letters
from penstock.client.letters import DEAD_LETTER_SETTINGS, RETRY_SETTINGS, dead_letter_topic, retry_topic
from penstock.client.settings import ConnectionSettings
from penstock.client.stores import StoreError, StoreUnavailable
from penstock.client.tracing import Spans

__all__ = ["Resources"]

#: Names that the raw client knows too.
_SHARED: Final = ("security.", "ssl.", "sasl.")


def now_ms() -> int:
    return round(time.time() * 1000)


class Resources:
    """Threads share it. Everything is made when it is first needed, and closed at the end."""

    def __init__(self, bootstrap: str, name: str, settings: Settings) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.settings = settings
        self.spans = Spans(client=name)
        self._lock = threading.RLock()
        self._publisher: Publisher | None = None
        self._opened: dict[tuple[Any, str], Any] = {}
        self._figures: dict[int, Figures] = {}

    def publisher(self) -> Publisher:
        """Another one, where the one before is of no use any more."""
        found = self._publisher
        if found is not None and not found.is_spent:
            return found
        with self._lock:
            found = self._publisher
            if found is not None and not found.is_spent:
                return found
            self._publisher = Publisher(producer_settings(self.bootstrap, self.name, self.settings))
            if found is not None:
                # Elsewhere, since it tells others what became of their messages.
                threading.Thread(target=found.close, name="penstock-spent", daemon=True).start()
            return self._publisher

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

    def figures_of(self, subscription: Subscription) -> Figures:
        with self._lock:
            return self._figures.setdefault(id(subscription), Figures())

    def cluster(self) -> Cluster:
        """For one thread, and to be closed."""
        shared = {name: value for name, value in self.settings.items() if name.startswith(_SHARED)}
        return Cluster(ConnectionSettings.parse({"bootstrap.servers": self.bootstrap, **shared}))

    def letter_topics(self, subscription: Subscription) -> dict[str, int]:
        """Made where they are missing; with their partitions. Raises ApplicationError, Unavailable, Refused."""
        made: dict[str, int] = {}
        cluster = self.cluster()
        try:
            found = cluster.topics(subscription.topics)
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

    def close(self, timeout_s: float) -> int:
        """How many messages were given up."""
        with self._lock:
            left = self._publisher.close(timeout_s) if self._publisher is not None else 0
            self._publisher = None
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()
        return left
