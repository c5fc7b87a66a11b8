"""What a newcomer gets from `pip install 'penstock[...]'` in an empty folder: the examples of the first pages work."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.brokers import BrokerProcess
from tests.install.environments import ROOT, Environment, build_wheel, installed, linked

pytestmark = pytest.mark.timeout(1800)

#: The extras that pyproject.toml declares, but for the one that other tests install, and those of this repository.
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    - {"spark", "dev", "docs"}
)
#: What each of them is for, as a program that does not run without it.
USES = {
    "redis": "import redis; from penstock.client.databases.redis import *",
    "postgres": "import psycopg; import penstock.client.databases.postgres",
    "outbox": "import sqlalchemy; import penstock.client.outbox",
    "tracing": "import penstock.client.opentelemetry_spans",
    "connect": "import grpc; import pyspark.sql.connect.session",
    "security": "import penstock.security.oauthbearer; import penstock.testing.certificates",
}
ORDERS = [
    {"id": "1", "customer": "ada", "quantity": 2, "price": 1.5},
    {"id": "2", "customer": "bob", "quantity": 0, "price": 1.0},
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)  # it may have a gigabyte


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def example(language: str, holding: str) -> str:
    """Return the block of the README, or of the page that goes on from it, that holds this text."""
    pages = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/first-steps.md"))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", pages, re.DOTALL | re.MULTILINE)
    (found,) = [text for kind, text in blocks if kind == language and holding in text]
    return str(found)


def example_commands(holding: str) -> list[list[str]]:
    lines = [line.partition(" #")[0].split() for line in example("", holding).splitlines()]
    return [words for words in lines if words]


def test_the_application(wheel: Path, environment: Path, empty: Path, fresh_broker: BrokerProcess) -> None:
    """Nothing but Penstock: the application, the queue's commands, and the fixture in a test suite."""
    made = linked(environment, wheel, "", "pytest")
    check_application(made, empty, fresh_broker.bootstrap_servers)
    (empty / "test_orders.py").write_text(
        "def publish_orders(servers): pass\n\n" + example("python", "def test_orders")
    )
    assert "1 passed" in made.run("python", "-m", "pytest", "-q", "test_orders.py", cwd=empty)


def check_application(made: Environment, empty: Path, bootstrap: str) -> None:
    code = example("python", "app.run()").replace("localhost:9092", bootstrap)
    # It runs until it is told to stop: that is when the order has come.
    ends = "\ndef bill(order: Order) -> None:\n    threading.Thread(target=app.stop).start()\n"
    code = "import threading\n" + code.replace("\ndef bill(order: Order) -> None:\n", ends)
    (empty / "app.py").write_text(code)
    assert made.run("python", "app.py", cwd=empty) == "alice owes 9.5\n"
    for command in example_commands("penstock group alter workers"):
        made.run(*command, cwd=empty, PENSTOCK_BOOTSTRAP=bootstrap)


def test_the_pipeline(wheel: Path, environment: Path, empty: Path, fresh_broker: BrokerProcess) -> None:
    check_pipeline(linked(environment, wheel, "spark"), empty, fresh_broker.bootstrap_servers)


def check_pipeline(made: Environment, empty: Path, bootstrap: str) -> list[list[str]]:
    """Return the commands that go on from that pipeline."""
    given = {"PENSTOCK_BOOTSTRAP": bootstrap}
    made.run("penstock", "topic", "create", "orders", cwd=empty, **given)
    (empty / "orders").write_text("\n".join([*map(json.dumps, ORDERS), "no order"]) + "\n")
    made.run("penstock", "produce", "orders", "--file", "orders", cwd=empty, **given)
    (empty / "orders_pipeline.py").write_text(example("python", "@pipeline"))
    (run,) = example_commands("penstock pipeline run orders_pipeline.py")
    made.run(*run, "--once", cwd=empty, **given)
    read = ("penstock", "consume", "orders.clean", "--from", "beginning", "--exit-at-end")
    assert [json.loads(line)["id"] for line in made.run(*read, cwd=empty, **given).splitlines()] == ["1"]
    return example_commands("penstock pipeline status clean-orders")


@pytest.mark.slow
def test_pip_installs_what_the_application_needs(
    wheel: Path, environment: Path, empty: Path, fresh_broker: BrokerProcess
) -> None:
    check_application(installed(environment, wheel, ""), empty, fresh_broker.bootstrap_servers)


@pytest.mark.slow
def test_pip_installs_what_a_pipeline_needs(
    wheel: Path, environment: Path, empty: Path, fresh_broker: BrokerProcess
) -> None:
    made, bootstrap = installed(environment, wheel, "spark"), fresh_broker.bootstrap_servers
    for command in check_pipeline(made, empty, bootstrap):
        ending = ["--once"] if "archive" in command else []
        made.run(*command, *ending, cwd=empty, PENSTOCK_BOOTSTRAP=bootstrap)
    assert list((empty / "lake" / "orders").rglob("*.parquet"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_installs_what_an_extra_is_for(wheel: Path, environment: Path, empty: Path, extra: str) -> None:
    installed(environment, wheel, extra).run("python", "-c", USES[extra], cwd=empty)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_names_what_it_is_for(wheel: Path, environment: Path, empty: Path, extra: str) -> None:
    linked(environment, wheel, extra).run("python", "-c", USES[extra], cwd=empty)
