"""Each sale is published once and in order through crashes: a short campaign, and tests of its checker.

`python -m tests.application.outbox.campaign --kills 200 --database postgresql` is a longer one.
"""

import threading
from pathlib import Path

import psycopg
import pytest
from tests.application.outbox import campaign, child
from tests.application.outbox.campaign import Campaign, Plan
from tests.application.outbox.child import ChildRelay, Job
from tests.application.outbox.judge import DOUBLED, LOST, ORDER, UNEXPECTED, Read, judge, read_all
from tests.application.outbox.relays import RelayProcess
from tests.application.outbox.shop import TOPICS, Sale, Shop
from tests.brokers import BrokerProcess, external_bootstrap
from tests.chaos.outcome import Outcome

KILLED = -9

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="needs a broker that it may kill")


def carry_out(folder: Path, plan: Plan, url: str) -> Outcome:
    outcome = Campaign(folder, plan, url=url).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.fired.total() == plan.kills
    assert outcome.least_work > 0
    assert outcome.figures["sales"] > 20
    assert outcome.figures["rolled back"] > 0
    return outcome


def test_every_sale_is_published_once(tmp_path: Path, postgres_url: str) -> None:
    """One fault of each kind but the last, which has a test of its own below."""
    plan = Plan(kills=4, database=campaign.POSTGRESQL, seed=3)
    assert carry_out(tmp_path, plan, postgres_url).figures["committed late"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_sale_is_published_once_for_longer(tmp_path: Path, url: str) -> None:
    carry_out(tmp_path, Plan(kills=60, database=url.partition(":")[0], seed=4), url)


# The same with a promise taken away from the relay: the judge has to notice.


class Scene:
    """A shop, a broker, and relays of which some die."""

    def __init__(self, folder: Path, url: str, broker: BrokerProcess) -> None:
        self._folder, self._broker = folder, broker
        self.shop = Shop(url).prepare()

    def job(self, **more: object) -> Job:
        return Job(url=self.shop.url, bootstrap=self._broker.bootstrap_servers, **more)  # type: ignore[arg-type]

    def launch(self, **more: object) -> RelayProcess:
        return RelayProcess(self.job(**more), self._folder / "relay.log")

    def relay(self, **more: object) -> None:
        """Here and now, until nothing is left."""
        ChildRelay(self.job(once=True, **more), print).run(threading.Event(), once=True)

    def findings(self) -> dict[str, int]:
        return dict(judge(read_all(self._broker.bootstrap_servers, TOPICS), self.shop.sales()).counts)


@pytest.fixture
def sqlite_scene(tmp_path: Path, sqlite_url: str, fresh_broker: BrokerProcess) -> Scene:
    return Scene(tmp_path, sqlite_url, fresh_broker)


@pytest.fixture
def postgres_scene(tmp_path: Path, postgres_url: str, fresh_broker: BrokerProcess) -> Scene:
    return Scene(tmp_path, postgres_url, fresh_broker)


@pytest.mark.parametrize(("mutation", "expected"), [("", {}), (child.NO_MARKER, {DOUBLED: 2})])
def test_killed_after_the_commit(sqlite_scene: Scene, mutation: str, expected: dict[str, int]) -> None:
    sqlite_scene.shop.sell_one("k1")
    sqlite_scene.shop.sell_one("k2")
    with sqlite_scene.launch(point=child.COMMITTED) as killed:
        assert killed.end() == KILLED
    sqlite_scene.relay(mutation=mutation)
    assert sqlite_scene.findings() == expected


@pytest.mark.parametrize(("mutation", "expected"), [("", {}), (child.HIGHEST_ID, {LOST: 1})])
def test_ids_that_are_committed_out_of_order(
    postgres_scene: Scene, mutation: str, expected: dict[str, int]
) -> None:
    shop = postgres_scene.shop
    slow = shop.connect()
    shop.sell(slow, "k1")
    shop.sell_one("k2")
    postgres_scene.relay(mutation=mutation)
    slow.commit()
    slow.close()
    postgres_scene.relay(mutation=mutation)
    assert postgres_scene.findings() == expected


def test_two_that_take_no_lock(sqlite_scene: Scene) -> None:
    """With it, the second waits: the campaign has two at once."""
    sqlite_scene.shop.sell_one("k1")
    with sqlite_scene.launch(
        point=child.SELECTED, signal="SIGSTOP", mutation=child.NO_LOCK, once=True
    ) as first:
        first.await_frozen()
        sqlite_scene.relay(mutation=child.NO_LOCK)
        first.thaw()
        assert first.end() == 0
    assert sqlite_scene.findings() == {DOUBLED: 1}


def test_a_zombie_that_has_lost_its_lock_unknowingly(postgres_scene: Scene) -> None:
    """It was frozen after it made sure of its lock, and before it committed: now only Kafka can refuse it."""
    shop = postgres_scene.shop
    shop.sell_one("k1")
    with postgres_scene.launch(point=child.COMMITTING, signal="SIGSTOP", once=True) as zombie:
        zombie.await_frozen()
        with psycopg.connect(shop.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'penstock outbox relay'"
            )
        postgres_scene.relay()
        zombie.thaw()
        assert zombie.end() == 0, "it has started again, and found nothing to do"
    assert postgres_scene.findings() == {}


# The judge itself


def read(message_id: str, count: int, partition: int = 0, offset: int = 0) -> Read:
    return Read("orders", partition, offset, message_id, "k", count)


SALES = [Sale("a", "orders", "k", 1), Sale("b", "orders", "k", 2)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([read("a", 1), read("b", 2)], {}),
        ([read("a", 1)], {LOST: 1}),
        ([read("a", 1), read("a", 1), read("b", 2)], {DOUBLED: 1}),
        ([read("a", 1), read("b", 2), read("c", 3)], {UNEXPECTED: 1}),
        ([read("b", 2), read("a", 1)], {ORDER: 1}),
    ],
)
def test_the_judge_notices(rows: list[Read], expected: dict[str, int]) -> None:
    assert dict(judge(rows, SALES).counts) == expected
