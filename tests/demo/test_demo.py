"""`penstock demo` with real processes: it runs, survives kills, stops all that it started, and can be resumed."""

import os
import signal
from pathlib import Path

from tests.demo.conftest import Run
from tests.waiting import eventually


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
