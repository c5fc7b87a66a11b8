"""The load logs in over TLS: it needs the login and the rules, and what it writes is verified."""

import ssl
from pathlib import Path

import pytest
from benchmarks.brokers.broker import PenstockBroker
from benchmarks.brokers.security import Security, allow_all_topics, set_quotas
from benchmarks.load.logins import LoginPlan, connect_flat_out
from benchmarks.load.processes import Job, WorkerFailed
from benchmarks.load.workload import Workload
from benchmarks.measure import Timing, run_jobs, run_workload
from benchmarks.wire.access import LOAD, LoginFailed

TIMING = Timing(0, 0.1)
WORKLOAD = Workload(value_bytes=100, producers=1, consumers=1, partitions=1)


def test_a_load_over_tls_with_a_login_rules_and_quotas(tmp_path: Path) -> None:
    with PenstockBroker(tmp_path / "broker", Security(tls=True, users=(LOAD,))) as broker:
        broker.start()
        with pytest.raises(WorkerFailed):
            run_workload(broker, WORKLOAD, TIMING)
        with broker.connect() as admin:
            allow_all_topics(admin, LOAD)
            set_quotas(admin, "user", LOAD, {"producer_byte_rate": 1e12})
        assert run_workload(broker, WORKLOAD, TIMING)["records_per_s"] >= 0
        access = broker.security.access(broker.folder)
        with pytest.raises(LoginFailed, match="nobody cannot log in"):
            access.as_user("nobody").open(broker.address, 60)
        run = run_jobs(broker, [Job(connect_flat_out, (LoginPlan(broker.address, access),))], [], TIMING)
        assert run.produced[0] > 0


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    security = Security(tls=True)
    security.prepare(tmp_path)
    with PenstockBroker(tmp_path / "broker", security) as broker:
        broker.start()
        broker.connect().socket.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            security.access(tmp_path).open(broker.address, 60)
