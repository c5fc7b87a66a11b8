"""Transactions over any interleaving of producers, late and repeated requests, timeouts, markers and crashes.

What is proved, and how, is in transaction_world.py: a transaction is decided once and stays so; a late EndTxn never
ends a later transaction; a fenced producer changes nothing; nothing hangs; time never decides about two phases; epochs
never fall; and a shard loaded from any surviving part of its log is the one that wrote it.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.properties.transaction_world import Client, World

IDS = ("a", "b")


class Transactions(RuleBasedStateMachine):
    #: Of the cluster; clients speak at most this.
    version = 2
    client_versions = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.version)

    @initialize(epochs=st.sampled_from([(), (5,), (32_764,), (32_766, 32_765)]))
    def used_ids(self, epochs: tuple[int, ...]) -> None:
        for transactional_id, epoch in zip(IDS, epochs, strict=False):
            self.world.seed(transactional_id, epoch)

    @precondition(lambda self: len(self.world.clients) < 6)
    @rule(
        transactional_id=st.sampled_from(IDS),
        place=st.integers(0, 9),
        two_phase=st.booleans(),
        keep=st.booleans(),
        now=st.booleans(),
    )
    def start(self, transactional_id: str, place: int, two_phase: bool, keep: bool, now: bool) -> None:
        version = self.client_versions[place % len(self.client_versions)]
        self.world.start(transactional_id, version=version, two_phase=two_phase, keep=keep)
        self._deliver_now(now)

    @precondition(lambda self: self._ready())
    @rule(place=st.integers(0, 9), keep=st.booleans(), now=st.booleans())
    def recover(self, place: int, keep: bool, now: bool) -> None:
        self.world.send_init(self._pick(self._ready(), place), claims=True, keep=keep)
        self._deliver_now(now)

    @precondition(lambda self: self._open())
    @rule(place=st.integers(0, 9), partition=st.integers(0, 2), now=st.booleans())
    def add(self, place: int, partition: int, now: bool) -> None:
        self.world.send_add(self._pick(self._open(), place), partition)
        self._deliver_now(now)

    @precondition(lambda self: self._ready())
    @rule(place=st.integers(0, 9), commit=st.booleans(), now=st.booleans())
    def end(self, place: int, commit: bool, now: bool) -> None:
        self.world.send_end(self._pick(self._ready(), place), commit=commit)
        self._deliver_now(now)

    @precondition(lambda self: self._open())
    @rule(place=st.integers(0, 9), commits=st.lists(st.booleans(), min_size=1, max_size=3))
    def transact(self, place: int, commits: list[bool]) -> None:
        """Some transactions with nothing in their way: what is late then comes late by whole transactions."""
        client = self._pick(self._open(), place)
        for commit in commits:
            self.finish()
            self.world.send_add(client, 0)
            self._deliver_now(True)
            self.world.send_end(client, commit=commit)
            self._deliver_now(True)

    @precondition(lambda self: self._open())
    @rule(place=st.integers(0, 9), two_phase=st.booleans())
    def hand_over(self, place: int, two_phase: bool) -> None:
        """An open transaction is left to a new incarnation."""
        client = self._pick(self._open(), place)
        self.finish()
        self.world.send_add(client, 1)
        self._deliver_now(True)
        self.world.start(client.transactional_id, version=client.version, two_phase=two_phase, keep=True)
        self._deliver_now(True)

    @precondition(lambda self: self.world.network)
    @rule(places=st.lists(st.integers(0, 10**6), min_size=1, max_size=3), surviving=st.integers(0, 2))
    def deliver_and_crash(self, places: list[int], surviving: int) -> None:
        for place in places:
            self.deliver(-1 - place % 5)
        self.crash(surviving)

    @rule()
    def finish(self) -> None:
        self.world.ask_markers()
        self.world.commit()
        for markers in self.world.handed_out[-4:]:
            self.world.write_markers(markers, markers.partitions)
        self.world.commit()

    @precondition(lambda self: self.world.network)
    @rule(place=st.integers(0, 10**6))
    def deliver(self, place: int) -> None:
        self.world.deliver(self.world.network[place % len(self.world.network)])

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(surviving=st.integers(0, 3))
    def crash(self, surviving: int) -> None:
        self.world.crash(self.world.committed + surviving)

    @rule()
    def ask_markers(self) -> None:
        self.world.ask_markers()

    @precondition(lambda self: self.world.handed_out)
    @rule(place=st.integers(0, 10**6), first=st.integers(0, 3), count=st.integers(0, 3))
    def write_markers(self, place: int, first: int, count: int) -> None:
        markers = self.world.handed_out[-1 - place % min(len(self.world.handed_out), 4)]
        self.world.write_markers(markers, markers.partitions[first : first + count] or markers.partitions)

    @rule(by_ms=st.sampled_from([1, 20, 150]))
    def time_passes(self, by_ms: int) -> None:
        self.world.tick(by_ms)

    def teardown(self) -> None:
        self.world.settle()

    def _deliver_now(self, now: bool) -> None:
        """Without luck of this kind, long stories would never be told."""
        if now:
            self.world.deliver(self.world.network[-1])
            self.world.commit()

    def _ready(self) -> list[Client]:
        return [client for client in self.world.clients if client.producer.epoch >= 0][-4:]

    def _open(self) -> list[Client]:
        return [client for client in self._ready() if not client.is_kept and client.verdict is None]

    @staticmethod
    def _pick(clients: list[Client], place: int) -> Client:
        return clients[-1 - place % len(clients)]


class OlderTransactions(Transactions):
    """The older protocol: what it cannot promise is not asked of it."""

    version = 1
    client_versions = (1,)


class MixedTransactions(Transactions):
    client_versions = (1, 2)


_SETTINGS = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTransactions = Transactions.TestCase
TestTransactions.settings = _SETTINGS
TestOlderTransactions = OlderTransactions.TestCase
TestOlderTransactions.settings = _SETTINGS
TestMixedTransactions = MixedTransactions.TestCase
TestMixedTransactions.settings = _SETTINGS
