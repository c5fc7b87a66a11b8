"""Fixtures for all tests: brokers, clusters, and unique names."""

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
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


@pytest.fixture(autouse=True)
def _logging_of_penstock_is_restored() -> Iterator[None]:
    """Tests that call `serve` in this process configure its logger, and later tests would see other levels."""
    logger = logging.getLogger("penstock")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays on one worker, and so do all that share the Spark session, which takes seconds and a gigabyte."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "spark" if WITH_SESSION.match(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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
