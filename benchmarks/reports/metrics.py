"""What is measured: one declaration per figure, which the table, the JSON file and the plot all read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    label: str
    higher_is_better: bool
    decimals: int

    def text(self, value: float | None) -> str:
        return "-" if value is None else f"{value:,.{self.decimals}f}"

    def is_win(self, ratio: float) -> bool:
        return ratio >= 1 if self.higher_is_better else ratio <= 1


def _more(name: str, label: str, decimals: int = 0) -> Metric:
    return Metric(name=name, label=label, higher_is_better=True, decimals=decimals)


def _less(name: str, label: str, decimals: int = 2) -> Metric:
    return Metric(name=name, label=label, higher_is_better=False, decimals=decimals)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _more("records_per_s", "messages/s in"),
        _more("consumed_records_per_s", "messages/s out"),
        _more("mb_per_s", "MB/s in", 1),
        _more("requests_per_s", "requests/s"),
        _less("cpu_s_per_gb", "CPU-s per GB in+out", 3),
        _less("cpu_us_per_request", "CPU-us per request", 1),
        _less("produce_p50_ms", "produce p50 ms"),
        _less("produce_p90_ms", "produce p90 ms"),
        _less("produce_p99_ms", "produce p99 ms"),
        _less("produce_p999_ms", "produce p99.9 ms"),
        _less("produce_max_ms", "produce max ms"),
        _less("end_to_end_p50_ms", "end-to-end p50 ms"),
        _less("end_to_end_p99_ms", "end-to-end p99 ms"),
        _less("start_to_ack_s", "exec to first ack s", 3),
        _less("start_cpu_s", "CPU-s until then"),
        _less("cluster_cpu_s_per_gb", "CPU-s per GB produced, all nodes", 3),
        _less("cluster_cpu_us_per_request", "CPU-us per request, all nodes", 1),
        _less("failover_s", "leader, s"),
        _less("failover_worst_s", "leader, worst, s"),
        _less("failover_controller_s", "leader and controller, s"),
        _less("failover_controller_worst_s", "leader and controller, worst, s"),
        _less("failover_default_client_s", "leader, seen by default client, s"),
        _more("txn_per_s", "transactions/s"),
        _more("txn_records_per_s", "messages/s in transactions"),
        _less("txn_p99_ms", "transaction p99 ms"),
        _less("cpu_us_per_txn", "CPU-us per transaction", 0),
        _more("txn_rate_of_plain", "rate of that of plain produce", 2),
        _less("txn_cpu_over_plain", "CPU over that of plain produce"),
        _more("acks_per_s", "acknowledgements/s"),
        _less("cpu_us_per_ack", "CPU-us per acknowledgement"),
        _less("rebalance_all_s", "first 99 join, s"),
        _less("rebalance_join_s", "one joins, s"),
        _less("rebalance_partitions_s", "100 more partitions, s"),
        _less("rebalance_leave_s", "one leaves, s"),
        _less("rebalance_crash_s", "one's session ends, s"),
        _less("rebalance_cpu_s", "CPU-s for all of it"),
        _less("idle_cpu_percent", "CPU, % of a core", 1),
        _less("create_topic_s", "create topic s", 2),
        _less("alone_p99_ms", "p99 ms, alone"),
        _less("attacked_p99_ms", "p99 ms, beside the attack"),
        _less("p99_ratio", "p99, times that alone"),
        _more("attack_per_s", "requests/s of the attack"),
        _less("peak_rss_mb", "peak RSS MB", 1),
        _less("rss_growth_mb", "RSS growth MB", 1),
        _more("connections_per_s", "connections/s"),
        _less("cpu_us_per_connection", "CPU-us per connection", 0),
        _less("security_cpu_ratio", "CPU, times that without security", 3),
        _less("access_decision_us", "decision, us", 3),
        _less("first_decision_us", "first decision, us", 3),
        _less("idle_rss_mb", "idle RSS MB", 1),
        _less("idle_pss_mb", "idle PSS MB", 1),
    )
}
