"""The goals, checked against a run."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.reports.stats import ratio

#: Median metrics by broker and scenario: figures["penstock"]["unbatched"]["requests_per_s"].
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]


class Goal(NamedTuple):
    """A bound on one of our own figures, or (`against_peer`) on its ratio to the peer's."""

    text: str
    scenario: str
    metric: str
    bound: float
    at_least: bool = False
    against_peer: bool = False


class Verdict(NamedTuple):
    goal: Goal
    value: float
    reached: bool


GOALS = (
    # A paced load never sends more than it was told to, so a hair less than a million is all of it.
    Goal("1 M messages/s of 100 B in", "offered-1M", "records_per_s", 0.995e6, at_least=True),
    Goal(
        "1 M messages/s of 100 B out, meanwhile",
        "offered-1M",
        "consumed_records_per_s",
        0.995e6,
        at_least=True,
    ),
    Goal("produce p99 < 10 ms at half saturation, 64 KB", "latency-half-batched", "produce_p99_ms", 10),
    Goal("produce p99 < 10 ms at half saturation, 1 record", "latency-half-unbatched", "produce_p99_ms", 10),
    Goal("end to end p99 < 15 ms at 2,000 requests/s", "latency-fixed", "end_to_end_p99_ms", 15),
    Goal("exec to first acknowledged record < 0.2 s", "start", "start_to_ack_s", 0.2),
    Goal("idle < 60 MB resident", "start", "idle_rss_mb", 60),
    Goal(
        "CPU per GB, flat out, no higher than Kafka's", "raw-100B-none", "cpu_s_per_gb", 1, against_peer=True
    ),
    Goal("CPU per GB, same offered rate", "offered-1M", "cpu_s_per_gb", 1, against_peer=True),
    Goal("CPU per request no higher than Kafka's", "unbatched", "cpu_us_per_request", 1, against_peer=True),
    *(
        Goal(f"fail-over < 5 s, {title}, worst of {whom}", f"failover-{fault}", metric, 5)
        for fault, title in (("kill", "kill -9"), ("freeze", "freeze"), ("cut", "cut network"))
        for whom, metric in (
            ("leaders", "failover_worst_s"),
            ("leading controllers", "failover_controller_worst_s"),
        )
    ),
    Goal("CPU per GB with TLS <= 0.8 of Kafka's", "tls-batched", "cpu_s_per_gb", 0.8, against_peer=True),
    Goal(
        "CPU per request with TLS <= 0.8 of Kafka's",
        "tls-unbatched",
        "cpu_us_per_request",
        0.8,
        against_peer=True,
    ),
    *(
        Goal(f"SASL, rules and quotas add <= 5 % CPU, {what}", f"sasl-{what}", "security_cpu_ratio", 1.05)
        for what in ("batched", "unbatched")
    ),
    *(
        Goal(f"p99 beside {attack} <= 2x that alone", f"neighbour-{attack}", "p99_ratio", 2)
        for attack in (
            "smallest",
            "largest",
            "connections",
            "metadata",
            "fetches",
            "transactions",
            "rebalances",
            "bombs",
            "handshakes",
        )
    ),
    Goal("access decision < 1 us per topic", "access-decision", "access_decision_us", 1),
    Goal("produce p99 < 10 ms, RF 3, 500 requests/s", "rf3-latency-1p", "produce_p99_ms", 10),
    Goal("end to end p99 < 15 ms, RF 3, 500 requests/s", "rf3-latency-1p", "end_to_end_p99_ms", 15),
)


#: Of `benchmarks.hostile`, where each attack is a scenario.
HOSTILE_GOALS = tuple(
    goal
    for attack in ("metadata", "drip", "bombs", "records", "partitions")
    for goal in (
        Goal(f"p99 beside {attack} <= 3x that alone", attack, "p99_ratio", 3),
        # queued.max.request.bytes, penstock.decompress.inflight.max.bytes, and what handling them takes.
        Goal(f"memory during {attack} grows by <= 448 MB", attack, "rss_growth_mb", 448),
    )
)


def check_goals(
    figures: Figures, ours: str, peer: str | None, goals: Sequence[Goal] = GOALS
) -> list[Verdict]:
    """Goals whose figures were measured; the others are left out."""
    verdicts = []
    for goal in goals:
        value = _figure(figures, ours, goal)
        if goal.against_peer:
            value = ratio(value, _figure(figures, peer, goal)) if peer else None
        if value is not None:
            reached = value >= goal.bound if goal.at_least else value <= goal.bound
            verdicts.append(Verdict(goal, value, reached))
    return verdicts


def _figure(figures: Figures, broker: str | None, goal: Goal) -> float | None:
    return figures.get(broker or "", {}).get(goal.scenario, {}).get(goal.metric)
