"""Rounds in which members stop in good order: the backlog is handled, and no new message is lost or doubled."""

import time
from collections.abc import Callable
from functools import partial

from tests.chaos.contracts import judge
from tests.chaos.contracts.jobs import CALM_SESSION_MS, CONSUMER, EXACTLY_ONCE, SESSION_MS, WITH_ROWS
from tests.chaos.contracts.judge import Case
from tests.chaos.contracts.lanes import Lane
from tests.chaos.contracts.nursery import Life
from tests.chaos.contracts.results import numbers_in, rows_in
from tests.chaos.readers import read_whole

from penstock.client.deadletters.headers import dead_letter_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import ConfigResourceType, alter_configs

DRAIN_S = 45.0
END_S = 40.0
STOPS = 2
ASK_AGAIN_S = 0.5
LOOK_S = 0.1


def case_of(lane: Lane, servers: str) -> Case:
    """As things are now."""
    terms = lane.terms

    def read(topic: str) -> dict[int, int]:
        return numbers_in(read_whole(servers, topic, "read_committed"))

    return Case(
        contract=terms.contract,
        shape=terms.shape,
        fails=terms.fails,
        topic=lane.topic,
        sent=lane.sent,
        story=lane.read(),
        published=read(lane.target) if terms.contract == EXACTLY_ONCE else {},
        rows=rows_in(terms.database) if terms.contract in WITH_ROWS else {},
        letters=read(dead_letter_topic(lane.topic)) if terms.fails else {},
        calm=tuple(lane.calm),
    )


class Calm:
    """Of one lane."""

    def __init__(self, lane: Lane, servers: str) -> None:
        self._lane = lane
        self._servers = servers
        self.problems: list[str] = []

    def drain(self, within_s: float = DRAIN_S) -> None:
        """Until nothing is missing, or for so long: then something is lost."""
        lives = {slot: self._lane.begin(slot) for slot in self._lane.slots}
        self._await_all(within_s)
        for life in lives.values():
            self._end(life)

    def go_through(self, count: int) -> None:
        """Members leave and come back in the middle of it."""
        lane = self._lane
        self.drain()
        lane.calm += lane.feed(count)
        self._set_session(CALM_SESSION_MS)
        begin = partial(lane.begin, is_calm=True)
        lives = {slot: begin(slot) for slot in lane.slots[1:]}
        for _ in range(STOPS):
            first = begin(lane.slots[0], stops_after=count // 4)
            if not _until(lambda: first.wait(LOOK_S) or lane.is_idle(), END_S):  # noqa: B023
                self.problems.append(f"{lane.topic}: a member does not stop; see its log")
            self._end(first)
        lives[lane.slots[0]] = begin(lane.slots[0])
        self._await_all(DRAIN_S)
        for life in lives.values():
            self._end(life)
        self._set_session(SESSION_MS)

    def _set_session(self, session_ms: int) -> None:
        """Brokers decide the session of members of the consumer protocol; others choose their own."""
        if self._lane.terms.protocol == CONSUMER:
            changes = {"consumer.session.timeout.ms": str(session_ms)}
            with Cluster(ConnectionSettings.parse({"bootstrap.servers": self._servers})) as cluster:
                alter_configs(cluster, ConfigResourceType.GROUP, f"{self._lane.topic}-group", changes)

    def _await_all(self, within_s: float) -> None:
        def is_done() -> bool:
            return self._lane.is_idle() and not judge.missing(case_of(self._lane, self._servers))

        _until(is_done, within_s)

    def _end(self, life: Life) -> None:
        def has_ended() -> bool:
            life.ask_to_end()
            return life.wait(ASK_AGAIN_S)

        if not _until(has_ended, END_S):
            life.show_stack()
            time.sleep(LOOK_S)
            self.problems.append(
                f"{self._lane.topic}: a member does not end when it is asked to; see its log"
            )
            life.kill()
        elif life.status:
            self.problems.append(f"{self._lane.topic}: a member ended with {life.status}; see its log")


def _until(is_so: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(LOOK_S)
    return False
