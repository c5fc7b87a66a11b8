"""Starts the components of the demo in the order in which they are needed, shows them, and stops them in reverse.

Two components stand for people who repair things. One enters a missing price and has those orders replayed. The other
opens a closed road and replays to shipping the parcels that became dead letters because of it, as
`penstock dlq replay parcels.dlq --to group --error RoadClosed` does by hand.
"""

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

from penstock.client.errors import ClientError
from penstock.client.signals import SignalEvent
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.topics import NewTopic, ensure_topic
from penstock.demo import names
from penstock.demo.access import BrokerAccess, BrokerSecurity
from penstock.demo.component import Component
from penstock.demo.processes import (
    INSTALL_HINT,
    REPLAY_COMMAND,
    BrokerProcess,
    ChildProcess,
    SparkProcess,
    missing_packages,
)
from penstock.demo.scene import EventLog, GroupLags, Scene, TopicCounter
from penstock.demo.shop import PriceList, Shop
from penstock.demo.story import Components, Story
from penstock.demo.subscribers import Billing, RoadClosed, Roads, Shipping
from penstock.demo.view import LineOutput, summary_lines
from penstock.testing.credentials import NoCryptography

#: A road is opened when this many parcels wait and this much time has passed since the last time.
_PARCELS_MIN: Final = 5
_ROAD_PAUSE_S: Final = 12.0
_ROAD_POLL_S: Final = 0.5


class RoadRepair(Component):
    def __init__(
        self,
        access: BrokerAccess,
        tally: TopicCounter,
        roads: Roads,
        journal: EventLog,
        *,
        pause_s: float = _ROAD_PAUSE_S,
    ) -> None:
        super().__init__("roads")
        self._settings = access.settings()
        self._tally = tally
        self._roads = roads
        self._journal = journal
        self._pause_s = pause_s

    @property
    def waiting(self) -> int:
        """Parcels that became dead letters because of a closed road and are not replayed yet."""
        return self._tally.errors[RoadClosed.__name__] - self._tally.records[names.PARCELS_REPLAYED]

    def work(self) -> None:
        rested_from = time.monotonic()
        while not self.stopping.wait(_ROAD_POLL_S):
            is_time = time.monotonic() - rested_from >= self._pause_s
            if is_time and self._tally.is_current and self.waiting >= _PARCELS_MIN:
                district = self._roads.open()
                count = self._replay()
                self._journal.add(
                    f"the road to district {district} is open: {count} parcels go to shipping again"
                )
                rested_from, self.trouble = time.monotonic(), None

    def _replay(self) -> int:
        """Replays only to the group whose dead letters they are, not to other readers of parcels. Returns how many."""
        from penstock.client.deadletters.dead_letter import DeadLetterFilter
        from penstock.client.deadletters.replay import Replay, ReplayRequest, plan_replay
        from penstock.client.deadletters.writer import ReplayDestination, ReplayTarget
        from penstock.spark.replay.lock import SparkReplayLock

        with Cluster(self._settings) as cluster:
            request = ReplayRequest(
                topic=cluster.await_topic(names.PARCEL_DEAD_LETTERS),
                id=f"demo-{time.time_ns()}",
                wanted=DeadLetterFilter(errors=(RoadClosed.__name__,), groups=(names.SHIPPING,)),
                destination=ReplayDestination(target=ReplayTarget.GROUP),
            )
            replay = Replay(cluster, request, plan_replay(cluster, request), should_stop=self.stopping.is_set)
            return replay.run(SparkReplayLock(cluster, names.PARCEL_DEAD_LETTERS)).replayed


#: The class of the errors that adding a price repairs.
REPAIRABLE_ERROR: Final = "NoPrice"
#: A price is added when this many orders wait and this much time has passed since the last time.
_ORDERS_MIN: Final = 5
_PRICE_PAUSE_S: Final = 20.0
_PRICE_POLL_S: Final = 1.0


class PriceRepair(Component):
    def __init__(
        self, tally: TopicCounter, spark: SparkProcess, prices: PriceList, journal: EventLog
    ) -> None:
        super().__init__("repairs")
        self._tally = tally
        self._spark = spark
        self._prices = prices
        self._journal = journal

    @property
    def waiting(self) -> int:
        """Dead letters that a price repairs and that are not replayed yet."""
        return self._tally.errors[REPAIRABLE_ERROR] - self._tally.records[names.REPLAYED]

    def work(self) -> None:
        rested_from = time.monotonic()
        while not self.stopping.wait(_PRICE_POLL_S):
            state = self._spark.state
            is_time = time.monotonic() - rested_from >= _PRICE_PAUSE_S
            if state.is_replaying or not state.is_up:
                rested_from = time.monotonic()
            elif is_time and self._tally.is_current and self.waiting >= _ORDERS_MIN:
                product = self._prices.add_special()
                self._journal.add(f"{product} has a price now, its dead letters go back to the topic")
                self._spark.send(REPLAY_COMMAND)
                rested_from = time.monotonic()


_REFRESH_S: Final = 0.5
_BROKER_START_S: Final = 30.0
#: Queries stop between two batches, and batches are short; a broker has little work to finish.
_COMPONENT_STOP_S: Final = 10.0
_SPARK_STOP_S: Final = 60.0
_BROKER_STOP_S: Final = 30.0
#: A second signal within this time is a duplicate of the first: `make` and the terminal send one each.
_SECOND_SIGNAL_AFTER_S: Final = 0.5
_TOPICS: Final = {
    names.ORDERS: names.PARTITIONS,
    names.CLEAN: names.PARTITIONS,
    names.REVENUE: 1,
    names.PARCELS: names.PARTITIONS,
}


class DemoFailed(ClientError):
    """The demo could not start; says why, and what may help."""

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
    #: TLS, a login and access rules; a folder that has them keeps them.
    secure: bool = False
    #: Draw a screen; otherwise write lines, at this interval.
    on_screen: bool
    lines_every_s: float


class Demo:
    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._folders = names.Folders(root=settings.data)
        self._journal = EventLog()
        self._stop = SignalEvent()
        self._stopped_at = 0.0
        self._broker = BrokerProcess(
            self._folders, listen=settings.listen, http=settings.http, security=self._security()
        )
        self._spark: SparkProcess | None = None
        self._parts: list[Component] = []

    def run(self) -> int:
        """Runs until a signal; returns 0 if broker and Spark ended well. Raises DemoFailed."""
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

    def _security(self) -> BrokerSecurity | None:
        """Raises DemoFailed."""
        folder = self._folders.security
        if not self._settings.secure and not folder.exists():
            return None
        try:
            return BrokerSecurity(folder, self._settings.listen)
        except NoCryptography as error:
            raise DemoFailed(str(error)) from None
        except (OSError, ValueError) as error:
            raise DemoFailed(f"--secure: {error}") from None

    # -- starting ------------------------------------------------------------------------------------

    def _begin(self) -> Story | None:
        """None if a signal asks to stop before the demo has started."""
        self._broker.start()
        self._broker.decided.wait(_BROKER_START_S)
        if self._stop.is_set():
            return None
        if self._broker.address is None:
            raise DemoFailed(_start_error(self._broker), "give other addresses with --listen and --http")
        access = self._broker.access
        self._journal.add(f"the broker is up on {access.bootstrap}")
        if access.properties is not None:
            self._journal.add(
                f"it has TLS, a login and access rules; clients need --command-config {access.properties}"
            )
        _make_topics(access)
        cast = self._cast(access)
        for part in self._parts:
            part.start()
        return Story(cast, self._journal, data=str(self._settings.data))

    def _cast(self, access: BrokerAccess) -> Components:
        prices = PriceList(self._folders.prices)
        shop = Shop(access, prices, per_s=self._settings.orders_per_s, chance=Random())
        billing, tally, roads = Billing(access), TopicCounter(access), Roads()
        shipping, lags = Shipping(access, roads), GroupLags(access, tuple(names.GROUPS.values()))
        reopening = RoadRepair(access, tally, roads, self._journal)
        self._parts = [shop, billing, shipping, tally, lags, reopening]
        if self._wants_spark():
            self._spark = SparkProcess(access, self._folders, self._journal)
            self._parts += [self._spark, PriceRepair(tally, self._spark, prices, self._journal)]
        return Components(
            broker=self._broker,
            shop=shop,
            billing=billing,
            shipping=shipping,
            tally=tally,
            lags=lags,
            spark=self._spark,
        )

    def _wants_spark(self) -> bool:
        absent = missing_packages()
        if absent and self._settings.with_spark:
            self._journal.add(
                f"no pipelines run, because {' and '.join(absent)} is not installed ({INSTALL_HINT})"
            )
        return self._settings.with_spark and not absent

    # -- running -------------------------------------------------------------------------------------

    def _play(self, story: Story | None) -> None:
        if story is None:
            return
        if self._settings.on_screen:
            self._play_on_screen(story)
        else:
            self._play_in_lines(story)

    def _play_on_screen(self, story: Story) -> None:
        from rich.console import Console

        from penstock.demo.view import Screen

        with Screen(Console()) as screen:
            self._loop(story, screen.show)
        for line in summary_lines(story.scene()):
            _print_line(line)

    def _play_in_lines(self, story: Story) -> None:
        lines = LineOutput(self._journal, _print_line, every_s=self._settings.lines_every_s)
        self._loop(story, lines.show)
        lines.show(story.scene())

    def _loop(self, story: Story, show: Callable[[Scene], None]) -> None:
        while not self._stop.is_set():
            self._journal.watch([self._broker, *self._parts])
            show(story.scene())
            self._stop.wait(_REFRESH_S)

    # -- stopping ------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._stop.is_set():
            self._stopped_at = now
        elif now - self._stopped_at > _SECOND_SIGNAL_AFTER_S:
            for child in (self._spark, self._broker):
                if child is not None:
                    child.kill()
        self._stop.set()

    def _end(self) -> None:
        """Stops the components first and the broker last, because they write to it."""
        self._stop.set()
        if self._parts:
            _print_line("stopping; Spark stops between two batches" if self._spark else "stopping")
        for part in self._parts:
            part.stop()
        for part in self._parts:
            _await_end(part, _SPARK_STOP_S if part is self._spark else _COMPONENT_STOP_S)
        self._broker.stop()
        _await_end(self._broker, _BROKER_STOP_S)


def _await_end(part: Component, timeout_s: float) -> None:
    if not part.join(timeout_s) and isinstance(part, ChildProcess):
        _print_line(
            f"{part.name} has not stopped within {timeout_s:g} s, killing it; the next start recovers"
        )
        part.kill()
        part.join(_COMPONENT_STOP_S)


def _start_error(broker: BrokerProcess) -> str:
    """The error line that the broker printed, or the last lines of its output."""
    lines = [line.strip() for line in broker.last_lines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), "; ".join(lines[-2:]))
    return f"the broker did not start: {reason.removeprefix('error:').strip() or f'see {broker.log}'}"


def _make_topics(access: BrokerAccess) -> None:
    with Cluster(access.settings()) as cluster:
        for name, partitions in _TOPICS.items():
            ensure_topic(cluster, NewTopic(name=name, partitions=partitions))


def _log_applications(path: Path) -> None:
    """Writes the applications' log to a file: messages about single records are not for the screen."""
    logger = logging.getLogger("penstock.client")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _print_line(line: str) -> None:
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
