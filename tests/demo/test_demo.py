"""`penstock demo` with real processes: it runs, survives kills, stops all that it started, and can be resumed."""

import os
import signal
import stat
from pathlib import Path

import pytest
from tests.demo.conftest import Run
from tests.planted import PlantedSecrets
from tests.waiting import eventually

from penstock.client import read_properties
from penstock.client.errors import AuthenticationFailed, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings


def test_without_spark_the_rest_flows_and_a_second_start_goes_on(run: Run) -> None:
    first = run("--no-spark", "--rate", "200")
    eventually(lambda: first.counts.get("orders", 0) > 100 and "billing" in first.lags, what="the flow")
    eventually(
        lambda: first.counts["shipping"] and first.counts["parcels.retry"], what="parcels on their way"
    )
    os.kill(first.pid_of("serve"), signal.SIGKILL)
    eventually(lambda: "broker works again" in first.output, what="a broker after the one that was killed")
    before = first.counts
    eventually(
        lambda: all(first.counts[name] > before[name] for name in ("orders", "shipping")), what="more orders"
    )
    assert first.stop() == 0, first.output
    assert first.processes() == {}
    assert "Traceback" not in first.output

    second = run("--no-spark", "--rate", "1")
    eventually(lambda: second.counts.get("orders", 0) >= first.counts["orders"], what="the same orders")
    assert second.stop() == 0, second.output
    assert second.processes() == {}


def test_a_secure_demo_flows_and_stays_secure(run: Run, tmp_path: Path) -> None:
    """With TLS, a login and access rules; no process shows a secret among its arguments."""
    first = run("--secure", "--no-spark", "--rate", "200")
    eventually(
        lambda: first.counts.get("shipping") and first.counts["parcels.retry"] and "billing" in first.lags,
        what="the flow",
    )
    security = tmp_path / "data" / "security"
    assert stat.S_IMODE(security.stat().st_mode) == 0o700
    planted = PlantedSecrets()
    for name in ("admin.password", "sasl.secret"):
        planted.add(name, (security / name).read_text())
    for name in ("ca.key", "node-1.pem"):
        planted.add_key(name, security / name)
    planted.check("\n".join(first.processes().values()), "the arguments of a process")
    # Not later: the demo may count from the beginning again, after a broker that was away.
    orders = first.counts["orders"]
    os.kill(first.pid_of("serve"), signal.SIGKILL)
    eventually(lambda: "broker works again" in first.output, what="a broker after the one that was killed")

    properties = read_properties(security / "client.properties")
    assert "orders" in topics(properties)
    address = {"bootstrap.servers": properties["bootstrap.servers"], "default.api.timeout.ms": "2000"}
    with pytest.raises(Unavailable):
        topics(address)
    with pytest.raises(AuthenticationFailed):
        topics(
            {**properties, **address, "sasl.jaas.config": "", "sasl.username": "admin", "sasl.password": "x"}
        )
    assert first.stop() == 0, first.output
    assert "Traceback" not in first.output
    planted.check(first.output, "the output of the demo")
    for log in (tmp_path / "data" / "logs").iterdir():
        planted.check(log.read_text(), str(log))

    second = run("--no-spark", "--rate", "1")
    eventually(lambda: second.counts.get("orders", 0) >= orders, what="the same orders")
    assert "orders" in topics(read_properties(security / "client.properties"))
    assert second.stop() == 0, second.output


def topics(settings: dict[str, str]) -> set[str]:
    with Cluster(ConnectionSettings.parse(settings)) as cluster:
        return set(cluster.topics())


def test_an_address_or_a_folder_that_is_taken_is_told_of_in_a_sentence(run: Run, tmp_path: Path) -> None:
    other = run("--no-spark")
    taken = eventually(lambda: other.bootstrap_servers, what="a broker")
    demo = run("--no-spark", "--listen", taken, "--data-dir", str(tmp_path / "other"))
    assert demo.ended() == 1
    assert "already in use" in demo.output
    assert "Traceback" not in demo.output

    rival = run("--no-spark")
    assert rival.ended() == 1
    assert "error: " in rival.output
    assert "Traceback" not in rival.output
    assert other.stop() == 0


def test_what_it_started_ends_with_it_even_when_it_is_killed(run: Run) -> None:
    demo = run("--no-spark")
    eventually(lambda: demo.bootstrap_servers, what="a broker")
    demo.crash()
    eventually(lambda: demo.processes() == {}, what="the end of its children")
