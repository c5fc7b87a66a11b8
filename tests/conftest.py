"""Fixtures for all tests: brokers, clusters, and unique names."""

import collections
import gc
import logging
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.brokers import BrokerProcess, ClusterProcesses, RunningBroker, external_bootstrap

from penstock.cli.os_process import raise_open_file_limit

#: How long an example takes says more about the machine than about the code.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

#: Tests of crashes leave files open, as crashes do.
raise_open_file_limit()


#: Files in folders of tests/spark that share one Spark session. One that is not found costs another session, no more.
WITH_SESSION = re.compile(
    r"tests/spark/\w+/(\w+_spark|test_(batches|batch_source|checkpoints|runner|schemas|secure|stream_source))\.py::"
)
SPARK = "spark"
#: What takes longest, and starts first: a worker that begins one of these last keeps the others waiting.
LONGEST = (
    SPARK,
    "tests/simulation/test_seeds.py",
    "tests/demo/test_story.py",
    "tests/chaos/contracts/test_contracts.py",
    "tests/spark/sink/test_campaign.py",
    "tests/install/test_install.py",
    "tests/chaos/nodes/test_nodes.py",
    "tests/spark/source/test_plain_session.py",
    "tests/compat/cli/test_cluster_cli.py",
    "tests/compat/cluster/test_raw_client_cluster.py",
    "tests/compat/cluster/test_transactions_cluster.py",
    "tests/properties/test_frame_fuzz.py",
    "tests/properties/test_state_fuzz.py",
    "tests/crash/test_dead_letters.py",
    "tests/crash/test_schedule.py",
    "tests/crash/test_crash.py",
    "tests/chaos/once/test_once.py",
    "tests/compat/cluster/test_dependencies.py",
    "tests/demo/test_demo.py",
    "tests/spark/test_examples_spark.py",
    "tests/chaos/copier/test_copier.py",
    "tests/chaos/share/test_share.py",
    "tests/chaos/rebalance/test_rebalance.py",
    "tests/chaos/schedule/test_schedule.py",
    "tests/spark/test_session_loss.py",
    "tests/simulation/test_replay.py",
    "tests/simulation/test_sized.py",
)


@pytest.fixture(autouse=True)
def _logging_of_penstock_is_restored() -> Iterator[None]:
    """Tests that call `serve` in this process configure its logger, and later tests would see other levels."""
    logger = logging.getLogger("penstock")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


def scope_of(nodeid: str) -> str:
    """A file stays on one worker, and so do all that share the Spark session, which takes seconds and a gigabyte."""
    return SPARK if WITH_SESSION.match(nodeid) else nodeid.split("::", 1)[0]


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest's own format of captured logs.

    PySpark's loggers give every handler a JSON formatter. Since version 9.2, pytest adds its handlers to them, because
    they do not propagate, and after a failed query `caplog.text` was JSON for the rest of the run.
    """
    from pyspark.logger import PySparkLogger

    setattr(PySparkLogger, "addHandler", logging.Logger.addHandler)  # noqa: B010 (mypy refuses the assignment)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples", type=int, default=1, metavar="N", help="run N times as many examples of each property"
    )


def _multiply_examples(items: list[pytest.Item], by: int) -> None:
    """Hypothesis keeps the settings of a function on the function, and those of a state machine on its test case."""
    done: set[int] = set()
    for item in items:
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        for holder, name in (
            (function, "_hypothesis_internal_use_settings"),
            (getattr(item, "cls", None), "settings"),
        ):
            current = getattr(holder, name, None)
            # A parametrized function is the same one in all its items.
            if isinstance(current, settings) and (id(holder), name) not in done:
                done.add((id(holder), name))
                setattr(holder, name, settings(current, max_examples=current.max_examples * by))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection makes a million objects that stay; scanning them again and again would take as long as making them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files that workers take: first what takes longest, then what has most tests."""
    if (by := config.getoption("examples")) != 1:
        _multiply_examples(items, by)
    if not hasattr(config, "workerinput"):
        return
    counts = collections.Counter(scope_of(item.nodeid) for item in items)
    ranks = {scope: rank for rank, scope in enumerate(LONGEST)}
    order = sorted(counts, key=lambda scope: (ranks.get(scope, len(ranks)), -counts[scope], scope))
    places = {scope: place for place, scope in enumerate(order)}
    items.sort(key=lambda item: places[scope_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # pytest_collection_modifyitems has ordered the files
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess | RunningBroker]:
    """One broker for all tests that do not stop it."""
    if address := external_bootstrap():
        yield RunningBroker(bootstrap_servers=address)
        return
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data").start()
    yield process
    assert process.stop() == 0, f"the broker did not end cleanly:\n{''.join(process.output)}"


@pytest.fixture(scope="module")
def broker_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., BrokerProcess]]:
    """`broker_with(settings)` starts a broker for the tests of one module."""
    if external_bootstrap():
        pytest.skip("needs a broker with settings of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    started: list[BrokerProcess] = []

    def start(settings: Mapping[str, str]) -> BrokerProcess:
        started.append(BrokerProcess(tmp_path_factory.mktemp("broker") / "data", settings))
        return started[-1].start()

    yield start
    for process in started:
        assert process.stop() == 0, f"the broker did not end cleanly:\n{''.join(process.output)}"


@pytest.fixture(scope="module")
def cluster_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ClusterProcesses]]:
    """`cluster_with(settings)` starts three nodes for the tests of one module; each test leaves all of them running."""
    started: list[ClusterProcesses] = []

    def start(settings: Mapping[str, str] | None = None) -> ClusterProcesses:
        started.append(ClusterProcesses(tmp_path_factory.mktemp("cluster"), settings=settings))
        return started[-1].start()

    yield start
    for processes in started:
        processes.kill()


@pytest.fixture
def tuned_broker(broker: BrokerProcess | RunningBroker) -> BrokerProcess:
    """The shared broker, for tests that rely on the settings that the suite gives it."""
    if not isinstance(broker, BrokerProcess):
        pytest.skip("needs a broker with the settings of the suite; PENSTOCK_TEST_BOOTSTRAP names another")
    return broker


@pytest.fixture
def fresh_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker for one test, which may stop, kill and restart it."""
    if external_bootstrap():
        pytest.skip("needs to restart the broker; PENSTOCK_TEST_BOOTSTRAP names one that is not ours to stop")
    process = BrokerProcess(tmp_path / "data").start()
    yield process
    process.stop()


@pytest.fixture
def bootstrap(broker: BrokerProcess | RunningBroker) -> str:
    return broker.bootstrap_servers


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Names that say which test they belong to and collide with nothing, even when suites run side by side."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:80]
    return lambda prefix: f"{prefix}-{test}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def group(unique: Callable[[str], str]) -> str:
    return unique("group")
