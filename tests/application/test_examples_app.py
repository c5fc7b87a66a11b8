"""The examples of the application layer and the snippet of the README run as documented."""

import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.application.apps import QUICK, Program, header, read_all
from tests.brokers import BrokerProcess, environment
from tests.waiting import eventually

from penstock.client import Message, Penstock
from penstock.protocol import dead_letter_headers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 60.0


def run(example: str, *arguments: str, folder: Path) -> list[str]:
    """Runs a program to its end, and shows its output if it fails."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    services: list[Program] = []

    def begin(program: Path, *arguments: str) -> Program:
        # Unbuffered, as in a terminal.
        command = [sys.executable, str(program), *arguments]
        services.append(Program(*command, folder=tmp_path, PYTHONUNBUFFERED="1"))
        return services[-1]

    yield begin
    for service in services:
        service.kill()


@pytest.fixture
def servers(fresh_broker: BrokerProcess) -> str:
    return fresh_broker.bootstrap_servers


def test_an_application_retries_and_buries(servers: str, tmp_path: Path) -> None:
    printed = run("billing_app.py", servers, folder=tmp_path)
    assert printed[:4] == [f"order {number} has offset {number}" for number in range(4)]
    attempts = [("0 of alice", 1), ("1 of bob", 1), ("2 of mallory", 1), ("3 of carol", 1)]
    attempts += [("1 of bob", 2), ("2 of mallory", 2), ("2 of mallory", 3)]
    assert sorted(printed[4:-1]) == sorted(f"order {order}, attempt {number}" for order, number in attempts)
    assert printed[-1] == "handled 3, retried 3, dead 1"


def test_each_bill_is_there_once_in_a_file(servers: str, tmp_path: Path) -> None:
    assert run("effectively_once_postgres.py", servers, folder=tmp_path) == [
        "order 1: 9.50",
        "order 2: 9.50",
        "order 3: 9.50",
        "2 came twice",
    ]
    assert (tmp_path / "bills.db").exists()


def test_each_bill_is_there_once_in_postgresql(servers: str, tmp_path: Path, postgres_url: str) -> None:
    printed = run("effectively_once_postgres.py", servers, postgres_url, folder=tmp_path)
    assert printed == ["order 1: 9.50", "order 2: 9.50", "order 3: 9.50", "2 came twice"]


def test_invoices_and_stock_are_there_exactly_once(servers: str, tmp_path: Path) -> None:
    printed = run("exactly_once_app.py", servers, folder=tmp_path)
    invoices = [f"invoice of order {number}: {2.5 * (number + 1):.2f}" for number in range(6)]
    stock = [f"taken for order {number}: {number + 1}" for number in range(6)]
    assert sorted(printed) == sorted(invoices + stock)


def test_totals_and_positions_share_a_database(servers: str, tmp_path: Path, postgres_url: str) -> None:
    totals = ["apples: 10", "bread: 10"]
    assert run("exactly_once_ledger.py", servers, folder=tmp_path) == totals
    # A database that knows nothing of the group yet goes on where the group is.
    assert run("exactly_once_ledger.py", servers, postgres_url, folder=tmp_path) == totals


def test_a_batch_handler_finds_the_one_that_is_bad(servers: str, tmp_path: Path) -> None:
    printed = run("batch_handler.py", servers, folder=tmp_path)
    assert printed == ["249 readings are kept, 1 is a dead letter"]


def test_the_snippet_of_the_readme(servers: str, tmp_path: Path, start: Start) -> None:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (snippet,) = [each for each in found if "@app.subscribe" in each]
    assert snippet.count("localhost:9092") == 1
    program = tmp_path / "readme.py"
    program.write_text(snippet.replace("localhost:9092", servers))
    service = start(program)
    service.await_line("alice owes 9.5")
    assert service.end() == 0, "\n".join(service.lines)


@pytest.mark.parametrize(
    "pattern",
    [
        r"""(?:group|group_id)=["']([^"']+)|["']group.id["']: ["']([^"']+)""",
        r"""(?:subscribe|subscriber)\(\s*\[?["']([^"']+)|["']subscribe["'], ["']([^"']+)|source=["']([^"']+)""",
    ],
    ids=["groups", "topics"],
)
def test_no_two_examples_have_a_group_or_a_topic_in_common(pattern: str) -> None:
    """Run after each other on one broker, none reads what another has left. Steps of a migration go on as one group."""
    found: dict[str, set[str]] = {}
    for path in EXAMPLES.glob("*.py"):
        for names in re.findall(pattern, path.read_text()):
            found.setdefault("".join(names), set()).add(path.name)
    assert len(found) > 10
    assert {name: sorted(users) for name, users in found.items() if len(users) > 1} == {}


# Migrating, step by step: every step goes on where the one before has stopped


def test_a_loop_is_migrated_step_by_step(servers: str, tmp_path: Path, start: Start) -> None:
    steps = EXAMPLES / "migrating"

    app = Penstock(servers)

    def publish(first: int) -> None:
        """Ten, as `publish_orders.py` does."""
        for number in range(first, first + 10):
            order: dict[str, Any] = {"id": number, "customer": f"c{number % 3}"}
            app.publish_soon(
                "shop.orders", order, key=order["customer"], headers={"message-id": f"order-{number}"}
            )
        assert app.flush() == 0

    def handled(step: str, count: int, *arguments: str) -> set[int]:
        """By a step that runs until it has billed so many, and is stopped then."""
        service = start(steps / step, servers, *arguments)
        eventually(lambda: len(service.printed("billed order")) >= count, what=f"{count} bills of {step}")
        assert service.end() == 0, "\n".join(service.lines)
        return {int(line.split()[2]) for line in service.printed("billed order")}

    run("migrating/publish_orders.py", servers, folder=tmp_path)
    assert handled("step0_loop.py", 10) == set(range(10))
    publish(10)
    assert handled("step1_handler.py", 10) == set(range(10, 20))
    app.publish("shop.orders", b'{"id": "twenty", "customer": "c2"}')
    publish(20)
    assert handled("step2_payload.py", 10) == set(range(20, 30))
    (letter,) = read_all(servers, "shop.orders.dlq")
    assert header(letter, dead_letter_headers.REASON_HEADER) == "unreadable"
    assert "id" in (header(letter, dead_letter_headers.ERROR_MESSAGE_HEADER) or "")
    publish(30)
    assert handled("step3_retries.py", 10) == set(range(30, 40))
    publish(40)
    publish(40)
    database = f"sqlite:///{tmp_path}/billing.db"
    assert handled("step4_once.py", 10, database) == set(range(40, 50))
    with sqlite3.connect(tmp_path / "billing.db") as bills:
        assert sorted(row[0] for row in bills.execute("SELECT id FROM bills")) == list(range(40, 50))
    app.close()


def test_a_loop_and_an_application_share_a_group_with_the_strategy_of_the_loop(
    bootstrap: str, unique: Callable[[str], str], group: str
) -> None:
    from confluent_kafka import Consumer

    topic = unique("orders")
    settings: dict[str, Any] = {**QUICK, "partition.assignment.strategy": "range,roundrobin"}
    app = Penstock(bootstrap, settings=settings)
    app.create_topic(topic, partitions=2)
    loop = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False, **QUICK})
    loop.subscribe([topic])
    eventually(lambda: loop.poll(0.1) is None and len(loop.assignment()) == 2, what="the loop's partitions")
    handled: list[int] = []

    @app.subscribe(topic, group=group)
    def handle(message: Message) -> None:
        handled.append(message.partition)

    def is_shared() -> bool:
        loop.poll(0.1)
        return len(loop.assignment()) == 1

    app.start()
    try:
        eventually(is_shared, what="a partition each")
        for partition in (0, 1):
            app.publish(topic, b"", partition=partition)
        eventually(lambda: loop.poll(0.1) is not None and len(handled) == 1, what="one message each")
    finally:
        loop.close()
        app.close()


def test_a_hot_key_is_spread_and_added_up_again(servers: str, tmp_path: Path) -> None:
    spread, order = run("hot_key.py", servers, folder=tmp_path)
    match = re.fullmatch(r"200 clicks of big-customer were in (\d) partitions", spread)
    assert match is not None, spread
    assert int(match[1]) >= 3
    assert order == "the steps of every cart are in order: True"


def test_no_two_examples_share_a_topic_or_a_group() -> None:
    """All steps, one after the other on one broker: each shows what it has done, and nothing of the others."""
    names: dict[str, set[str]] = {}
    for path in sorted(EXAMPLES.rglob("*.py")):
        unit = path.relative_to(EXAMPLES).parts[0]  # the steps of a migration belong together
        if unit == "pytest_example":
            continue  # brokers of its own
        words = path.read_text()
        groups = re.findall(r"""group(?:_id|\.id"|=|_id=)[=:]?\s*f?"([\w.-]+)\"""", words)
        topics = re.findall(
            r"""(?:subscribe|subscriber|publish|publish_soon|add)\(\[?\s*"([\w.-]+)\"""", words
        )
        for name in {f"group {each}" for each in groups} | {f"topic {each}" for each in topics}:
            names.setdefault(name, set()).add(unit)
    assert len(names) > 20
    assert {name: units for name, units in names.items() if len(units) > 1} == {}
