"""The requests of each attack are answered, and do what they are named after."""

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.brokers.broker import PenstockBroker
from benchmarks.brokers.security import Security
from benchmarks.load.attacks import ATTACKS, THREADS, Target, Under
from benchmarks.scenarios.neighbours import NOISY, SCENARIOS, set_up
from benchmarks.wire.access import LOAD
from benchmarks.wire.raw_client import end_offsets


class Enough(Exception):
    """The attack has had an answer."""


class Once(Under):
    def report(self, requests: int) -> None:
        raise Enough


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PenstockBroker]:
    security = Security(tls=True, users=(LOAD, NOISY))
    with PenstockBroker(tmp_path_factory.mktemp("attacks") / "broker", security) as broker:
        broker.start()
        yield broker


@pytest.fixture(scope="module")
def target(broker: PenstockBroker) -> Target:
    return replace(set_up(broker, "connections"), connections=2 * THREADS)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_answered(name: str, broker: PenstockBroker, target: Target) -> None:
    under = Once(target, multiprocessing.Event(), multiprocessing.Value("q", 0))
    outcomes: list[bool] = []

    def attack(number: int) -> None:
        try:
            ATTACKS[name](under, number)
        except Enough:
            outcomes.append(True)

    threads = [
        threading.Thread(target=attack, args=(n,)) for n in range(THREADS if name == "connections" else 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * len(threads)
    written = {"largest": target.topic, "bombs": target.compacted}
    if name in written:
        with broker.connect() as admin:
            assert end_offsets(admin, written[name], [0]) == [1]


def test_each_attack_has_a_scenario() -> None:
    assert [scenario.name for scenario in SCENARIOS] == [f"neighbour-{name}" for name in ATTACKS]
