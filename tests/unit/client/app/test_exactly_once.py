"""Exactly once: a transaction commits the offsets of what was handled, also when partitions are revoked meanwhile."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.unit.client.app.raw_message import Place, RawMessage

from penstock.client.app.contracts import ContractSession
from penstock.client.app.exactly_once import ExactlyOnce
from penstock.client.app.figures import Figures
from penstock.client.app.handler import loop_over_call
from penstock.client.app.runners import MessageRunner


class Membership:
    """As far as the contract needs it: everything of a batch was taken, and may be put back."""

    def __init__(self, batch: Sequence[RawMessage]) -> None:
        self._lock = threading.RLock()
        self.reached = {("orders", raw.at[0]): raw.at[1] + 1 for raw in batch}
        self.rewound: list[dict[Place, int]] = []

    def held(self) -> Any:
        return self._lock

    def put_back(self, raws: Sequence[RawMessage]) -> None:
        for raw in raws:
            place = "orders", raw.at[0]
            self.reached[place] = min(self.reached[place], raw.at[1])

    def positions(self, pending: Sequence[RawMessage] = ()) -> dict[Place, int]:
        with self._lock:
            self.put_back(pending)
            return dict(self.reached)

    def metadata(self) -> None:
        pass

    def rewind(self, positions: dict[Place, int]) -> None:
        self.rewound.append(positions)


class Publisher:
    def __init__(self) -> None:
        self.committed: list[dict[Place, int]] = []
        self.aborted = 0

    def begin(self) -> None:
        pass

    def commit(self, positions: Mapping[Place, int], group: Any) -> None:
        self.committed.append(dict(positions))

    def abort(self) -> None:
        self.aborted += 1


class Letters:
    def settle(self) -> None:
        pass


@contextmanager
def at_work(
    call: Callable[[RawMessage], Any], batch: Sequence[RawMessage]
) -> Iterator[tuple[Any, Membership, Publisher]]:
    membership, publisher, letters = Membership(batch), Publisher(), Letters()
    runner = MessageRunner(loop_over_call(call), lambda raw, error: None, Figures())
    session = ContractSession(runner, letters, Figures())  # type: ignore[arg-type]
    session.membership = membership  # type: ignore[assignment]
    yield ExactlyOnce(session, lambda: publisher), membership, publisher  # type: ignore[arg-type,return-value]


def stopped_in_the_middle() -> tuple[list[tuple[int, int]], list[dict[Place, int]]]:
    """What was handled, and what was committed."""
    batch = [
        RawMessage(5),
        RawMessage(6),
        RawMessage(3, partition=1),
        RawMessage(7),
    ]
    handled: list[tuple[int, int]] = []
    stopping: list[threading.Thread] = []

    def call(raw: RawMessage) -> None:
        handled.append(raw.at)
        if raw.at == (0, 6):
            stopping.append(threading.Thread(target=contract.stop))
            stopping[0].start()

    with at_work(call, batch) as (contract, _, publisher):
        contract.process(batch)
        stopping[0].join()
    return handled, publisher.committed


def test_a_stop_in_the_middle_commits_what_was_handled() -> None:
    """The other thread may be anywhere in its work when this one finds no messages left."""
    for _ in range(200):
        handled, committed = stopped_in_the_middle()
        expected = {("orders", partition): offset + 1 for partition, offset in handled}
        assert committed == [expected]


def test_a_partition_that_went_away_meanwhile_leaves_nothing() -> None:
    def call(raw: RawMessage) -> None:
        membership.reached.pop(("orders", 1), None)

    batch = [RawMessage(5), RawMessage(3, partition=1)]
    with at_work(call, batch) as (contract, membership, publisher):
        contract.process(batch)
    assert (publisher.committed, publisher.aborted) == ([], 1)
    assert membership.rewound == [{("orders", 0): 5, ("orders", 1): 3}]


def test_a_partition_that_went_and_came_back_leaves_nothing() -> None:
    def call(raw: RawMessage) -> None:
        membership.reached["orders", 0] = 5

    batch = [RawMessage(5), RawMessage(6)]
    with at_work(call, batch) as (contract, membership, publisher):
        contract.process(batch)
    assert (publisher.committed, publisher.aborted) == ([], 1)


def test_a_batch_that_failed_does_not_spoil_the_next() -> None:
    fails = [True]

    def call(raw: RawMessage) -> None:
        if fails.pop() if fails else False:
            membership.reached.pop(("orders", 0))

    batch = [RawMessage(5)]
    with at_work(call, batch) as (contract, membership, publisher):
        contract.process(batch)
        membership.reached["orders", 0] = 6
        contract.process(batch)
    assert publisher.committed == [{("orders", 0): 6}]
