"""Load processes: counted, started together, and their failures reported."""

import os
import shutil

import pytest
from benchmarks.brokers.kafka import PeerUnavailable, fetch_kafka
from benchmarks.load.processes import Counters, Job, LoadProcesses, Phase, Slot, WorkerFailed


def produce(slot: Slot, records: int) -> int:
    slot.publish(requests=records // 10, records=records)
    slot.set_ready()
    slot.wait_for(Phase.STOP)
    return records


def consume(slot: Slot, records: int) -> int:
    slot.publish(requests=1, records=records)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    lag_records = slot.lag_records()
    slot.wait_for(Phase.DRAIN)
    return lag_records


def fail(slot: Slot) -> None:
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    raise ValueError("the broker said no")


def vanish(slot: Slot) -> None:
    os._exit(1)


def test_counters_are_summed_by_role_and_results_come_back() -> None:
    with LoadProcesses([Job(produce, (100,)), Job(produce, (50,))], [Job(consume, (30,))]) as processes:
        processes.enter(Phase.RUN)
        assert processes.produced() == Counters(requests=15, records=150)
        assert processes.consumed() == Counters(requests=1, records=30)
        assert processes.finish() == ([100, 50], [120])


def test_a_failing_worker_fails_the_run_with_its_traceback() -> None:
    with (
        LoadProcesses([Job(fail, ())], []) as processes,
        pytest.raises(WorkerFailed, match="the broker said no"),
    ):
        processes.finish()


def test_a_worker_that_is_killed_fails_the_run() -> None:
    with pytest.raises(WorkerFailed, match="was killed"), LoadProcesses([Job(vanish, ())], []):
        pass


def test_without_java_the_peer_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(PeerUnavailable, match="`java` is not installed"):
        fetch_kafka()
