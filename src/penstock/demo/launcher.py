"""Everything put together: started in the order in which it is needed, shown, and stopped the other way round."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.settings import ConnectionSettings
from penstock.client.signals import SignalEvent
from penstock.client.topics import NewTopic, ensure_topic
from penstock.demo.billing import Billing
from penstock.demo.broker import Broker
from penstock.demo.children import Child
from penstock.demo.journal import Journal
from penstock.demo.lags import Lags
from penstock.demo.lines import Lines, block
from penstock.demo.names import CLEAN, GROUPS, ORDERS, PARCELS, PARTITIONS, REVENUE, Folders
from penstock.demo.parcels import Roads
from penstock.demo.parts import Part
from penstock.demo.prices import PriceList
from penstock.demo.reopening import Reopening
from penstock.demo.repairs import Repairs
from penstock.demo.scene import Scene
from penstock.demo.shipping import Shipping
from penstock.demo.shop import Shop
from penstock.demo.spark_child import HOW_TO_GET, Spark, missing
from penstock.demo.story import Cast, Story
from penstock.demo.tally import Tally

_REFRESH_S: Final = 0.5
_BROKER_START_S: Final = 30.0
#: Queries end between two batches, and batches are short; a broker has little to finish.
_PART_STOP_S: Final = 10.0
_SPARK_STOP_S: Final = 60.0
_BROKER_STOP_S: Final = 30.0
#: A second signal within this time is the first one by another way: `make` and the terminal send one each.
_IMPATIENT_AFTER_S: Final = 0.5
_TOPICS: Final = {ORDERS: PARTITIONS, CLEAN: PARTITIONS, REVENUE: 1, PARCELS: PARTITIONS}


class DemoFailed(ClientError):
    """It could not begin; says why, and what may help."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    data: Path
    listen: str
    http: str | None
    orders_per_s: float
    with_spark: bool
    #: Draw a screen; else write lines, so often.
    on_screen: bool
    lines_every_s: float


class House:
    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._folders = Folders(root=settings.data)
        self._journal = Journal()
        self._stop = SignalEvent()
        self._stopped_at = 0.0
        self._broker = Broker(self._folders, listen=settings.listen, http=settings.http)
        self._spark: Spark | None = None
        self._parts: list[Part] = []

    def run(self) -> int:
        """Until told to stop; 0 if all of it ended well. Raises DemoFailed."""
        try:
            self._folders.make()
        except OSError as error:
            raise DemoFailed(f"{self._settings.data}: {error.strerror}") from None
        _log_applications(self._folders.logs / "applications.log")
        with _signals(self._on_signal):
            try:
                self._play(self._begin())
            finally:
                self._end()
        return 1 if any(part.trouble for part in (self._broker, self._spark) if part is not None) else 0

    # -- coming --------------------------------------------------------------------------------------

    def _begin(self) -> Story | None:
        """None where somebody wants it to end before it has begun."""
        self._broker.start()
        self._broker.decided.wait(_BROKER_START_S)
        if self._stop.is_set():
            return None
        if self._broker.address is None:
            raise DemoFailed(_why_not(self._broker), "--listen and --http name other addresses")
        self._journal.say(f"the broker is up on {self._broker.address}")
        _make_topics(self._broker.address)
        cast = self._cast(self._broker.address)
        for part in self._parts:
            part.start()
        return Story(cast, self._journal, data=str(self._settings.data))

    def _cast(self, address: str) -> Cast:
        prices = PriceList(self._folders.prices)
        shop = Shop(address, prices, per_s=self._settings.orders_per_s, chance=Random())
        billing, tally, roads = Billing(address), Tally(address), Roads()
        shipping, lags = Shipping(address, roads), Lags(address, tuple(GROUPS.values()))
        reopening = Reopening(address, tally, roads, self._journal)
        self._parts = [shop, billing, shipping, tally, lags, reopening]
        if self._wants_spark():
            self._spark = Spark(address, self._folders, self._journal)
            self._parts += [self._spark, Repairs(tally, self._spark, prices, self._journal)]
        return Cast(
            broker=self._broker,
            shop=shop,
            billing=billing,
            shipping=shipping,
            tally=tally,
            lags=lags,
            spark=self._spark,
        )

    def _wants_spark(self) -> bool:
        absent = missing()
        if absent and self._settings.with_spark:
            self._journal.say(f"no pipelines: {' and '.join(absent)} missing here ({HOW_TO_GET})")
        return self._settings.with_spark and not absent

    # -- staying -------------------------------------------------------------------------------------

    def _play(self, story: Story | None) -> None:
        if story is None:
            return
        if self._settings.on_screen:
            self._play_on_screen(story)
        else:
            self._play_in_lines(story)

    def _play_on_screen(self, story: Story) -> None:
        from rich.console import Console

        from penstock.demo.screen import Screen

        with Screen(Console()) as screen:
            self._loop(story, screen.show)
        for line in block(story.scene()):
            _write(line)

    def _play_in_lines(self, story: Story) -> None:
        lines = Lines(self._journal, _write, every_s=self._settings.lines_every_s)
        self._loop(story, lines.show)
        lines.show(story.scene())

    def _loop(self, story: Story, show: Callable[[Scene], None]) -> None:
        while not self._stop.is_set():
            self._journal.watch([self._broker, *self._parts])
            show(story.scene())
            self._stop.wait(_REFRESH_S)

    # -- going ---------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._stop.is_set():
            self._stopped_at = now
        elif now - self._stopped_at > _IMPATIENT_AFTER_S:
            self._kill_all()
        self._stop.set()

    def _kill_all(self) -> None:
        for child in (self._spark, self._broker):
            if child is not None:
                child.kill()

    def _end(self) -> None:
        """Who writes ends first, and the broker last."""
        self._stop.set()
        if self._parts:
            _write("stopping; Spark ends between two batches" if self._spark else "stopping")
        for part in self._parts:
            part.stop()
        for part in self._parts:
            _see_off(part, _SPARK_STOP_S if part is self._spark else _PART_STOP_S)
        self._broker.stop()
        _see_off(self._broker, _BROKER_STOP_S)


def _see_off(part: Part, patience_s: float) -> None:
    if not part.join(patience_s) and isinstance(part, Child):
        _write(f"{part.name} is not stopped within {patience_s:g} s, killing it; the next start recovers")
        part.kill()
        part.join(_PART_STOP_S)


def _why_not(broker: Broker) -> str:
    """What the broker itself has said of it, or the end of that."""
    lines = [line.strip() for line in broker.last_lines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), "; ".join(lines[-2:]))
    return f"the broker did not start: {told.removeprefix('error:').strip() or f'see {broker.log}'}"


def _make_topics(address: str) -> None:
    settings = ConnectionSettings.parse({"bootstrap.servers": address})
    with Cluster(settings) as cluster:
        for name, partitions in _TOPICS.items():
            ensure_topic(cluster, NewTopic(name=name, partitions=partitions))


def _log_applications(path: Path) -> None:
    """What they tell of single messages is no news for the screen."""
    logger = logging.getLogger("penstock.client")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _write(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
