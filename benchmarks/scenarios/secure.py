"""What security costs: TLS, logins with access rules and quotas, connection set-ups, access decisions.

Each scenario has brokers of its own, as a broker has one kind of security. What is compared on one machine takes turns.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

from benchmarks.brokers.broker import Broker
from benchmarks.brokers.security import LOAD_ONLY, OPEN, Security, allow_all_topics, set_quotas
from benchmarks.load.logins import LoginPlan, connect_flat_out
from benchmarks.load.processes import Job
from benchmarks.load.workload import Workload
from benchmarks.measure import Metrics, Timing, run_jobs, run_workload, warm_up
from benchmarks.reports.stats import median
from benchmarks.scenarios.scenario import Measure, Pace, Scenario, Site
from benchmarks.scenarios.unbatched import FLAT_OUT
from benchmarks.wire.access import LOAD
from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.security.authorizer import Authorizer

_BATCHED = Workload(value_bytes=1024)
_TLS = Security(tls=True)
#: Never reached, so that each request is counted and none is throttled.
_QUOTAS = {"producer_byte_rate": 1e12, "consumer_byte_rate": 1e12, "request_percentage": 1e6}
#: Pairs of runs without and with security, whose median counts.
_PAIRS = 3
_LOGIN_PROCESSES = 4
_RULES = 10_000
_TOPICS = 1_000
_DECISIONS = 200_000


@contextmanager
def secured(site: Site, security: Security) -> Iterator[Broker]:
    """A running broker of the site's kind, with rules and quotas for the user of the load."""
    assert issubclass(site.kind, Broker)
    with (
        TemporaryDirectory(dir=site.folder) as folder,
        site.kind(Path(folder) / "broker", security) as broker,
    ):
        broker.start()
        if security.users:
            with broker.connect() as admin:
                allow_all_topics(admin, LOAD)
                set_quotas(admin, "user", LOAD, _QUOTAS)
        yield broker


def _with_tls(workload: Workload) -> Measure:
    def measure(site: Site) -> Metrics:
        with secured(site, _TLS) as broker:
            warm_up(broker, workload, site.pace.warm_up)
            return run_workload(broker, workload, site.pace.timing)

    return measure


def _overhead(workload: Workload, metric: str) -> Measure:
    """Two brokers take turns: one without security, one with logins, rules and quotas, both without TLS."""

    def measure(site: Site) -> Metrics:
        with ExitStack() as stack:
            brokers = [stack.enter_context(secured(site, security)) for security in (OPEN, LOAD_ONLY)]
            for broker in brokers:
                warm_up(broker, workload, site.pace.warm_up)
            costs: list[list[float]] = [[], []]
            for turn in range(_PAIRS):
                for which in (0, 1) if turn % 2 else (1, 0):
                    found = run_workload(brokers[which], workload, site.pace.timing)
                    costs[which].append(found[metric])
        without, with_security = map(median, costs)
        return {
            metric: with_security,
            f"open_{metric}": without,
            "security_cpu_ratio": median([cost / open for open, cost in zip(*costs, strict=True)]),
        }

    return measure


def _set_ups(security: Security) -> Measure:
    def measure(site: Site) -> Metrics:
        with secured(site, security) as broker:
            access = broker.security.access(broker.folder).as_user(LOAD)
            jobs = [Job(connect_flat_out, (LoginPlan(broker.address, access),))] * _LOGIN_PROCESSES
            broker.connect().socket.close()
            run_jobs(broker, jobs, [], _warm(site.pace))
            window = run_jobs(broker, jobs, [], site.pace.timing).window
        count = window.produced.requests
        return {
            "connections_per_s": count / window.wall_s,
            "cpu_us_per_connection": window.broker_cpu_s / count * 1e6,
        }

    return measure


def _warm(pace: Pace) -> Timing:
    return Timing(0, pace.warm_up.duration_s)


def _decisions(_: Site) -> Metrics:
    """As a request asks: for one principal, about one topic after the other; first each once, then again and again."""
    rules = {
        UUID(int=number): AclBinding(
            ResourceType.TOPIC,
            f"team-{number % 500}-{number}" if number % 2 else f"team-{number % 500}-",
            PatternType.LITERAL if number % 2 else PatternType.PREFIXED,
            f"User:user-{number % 100}",
            "*",
            Operation.READ if number % 3 else Operation.WRITE,
            Permission.ALLOW if number % 10 else Permission.DENY,
        )
        for number in range(_RULES)
    }
    authorizer = Authorizer(rules)
    topics = [f"team-{number % 500}-{number}" for number in range(_TOPICS)]
    decisions = authorizer.decisions(("User", "user-1"), "127.0.0.1")
    first_us = _time_of(decisions.allows, topics, 1)
    return {
        "first_decision_us": first_us,
        "access_decision_us": _time_of(decisions.allows, topics, _DECISIONS // _TOPICS),
    }


def _time_of(allows: object, topics: Sequence[str], rounds: int) -> float:
    """In CPU time of this process, so that a busy machine counts less."""
    assert callable(allows)
    operation, kind = int(Operation.READ), int(ResourceType.TOPIC)
    began = time.process_time_ns()
    for _ in range(rounds):
        for topic in topics:
            allows(operation, kind, topic)
    return (time.process_time_ns() - began) / rounds / len(topics) / 1e3


def _scenario(name: str, title: str, measure: Measure, *shown: str, **others: bool) -> Scenario:
    return Scenario(name=name, title=title, measure=measure, shown=shown, needs_warm=False, **others)


SCENARIOS = (
    _scenario(
        "tls-batched",
        "TLS 1.3, raw frames, 1 KB",
        _with_tls(_BATCHED),
        "records_per_s",
        "mb_per_s",
        "cpu_s_per_gb",
        quick=True,
    ),
    _scenario(
        "tls-unbatched",
        "TLS 1.3, single 100 B",
        _with_tls(FLAT_OUT),
        "requests_per_s",
        "cpu_us_per_request",
        quick=True,
    ),
    _scenario(
        "sasl-batched",
        "SASL, rules, quotas; 1 KB",
        _overhead(_BATCHED, "cpu_s_per_gb"),
        "cpu_s_per_gb",
        "security_cpu_ratio",
        quick=True,
    ),
    _scenario(
        "sasl-unbatched",
        "SASL, rules, quotas; single 100 B",
        _overhead(FLAT_OUT, "cpu_us_per_request"),
        "cpu_us_per_request",
        "security_cpu_ratio",
        quick=True,
    ),
    *(
        _scenario(
            f"connect-{name}",
            f"set-ups, {title}",
            _set_ups(security),
            "connections_per_s",
            "cpu_us_per_connection",
            quick=name != "plain",
        )
        for name, title, security in (
            ("plain", "no security", OPEN),
            ("sasl", "SASL PLAIN", LOAD_ONLY),
            ("tls", "TLS 1.3 handshake", _TLS),
            ("tls-sasl", "TLS 1.3 and SASL PLAIN", Security(tls=True, users=(LOAD,))),
        )
    ),
    Scenario(
        name="access-decision",
        title="decision per topic, 10,000 rules",
        measure=_decisions,
        shown=("access_decision_us", "first_decision_us"),
        quick=True,
        needs_warm=False,
        runs_on=("penstock",),
    ),
)
