"""Ratios, goals and costs as they are printed."""

import json

from benchmarks import hostile
from benchmarks.load.processes import Counters
from benchmarks.load.results import Timeline, int64s
from benchmarks.measure import Window, end_to_end, throughput_metrics
from benchmarks.reports.goals import GOALS, HOSTILE_GOALS, check_goals
from benchmarks.reports.metrics import METRICS
from benchmarks.reports.plot import PANELS
from benchmarks.reports.report import (
    Beside,
    disturbed,
    figures_of,
    goal_documents,
    json_document,
    ratio_rows,
    results_table,
)
from benchmarks.run import Result
from benchmarks.scenarios.scenario import Scenario
from benchmarks.suites import cluster, neighbours, queue, secure, single


def result(name: str, shown: tuple[str, ...], **rounds: list[dict[str, float]]) -> Result:
    scenario = Scenario(name=name, title=f"title of {name}", measure=lambda _: {}, shown=shown)
    return Result(scenario=scenario, rounds=rounds)


def test_rows_divide_our_median_by_the_peers() -> None:
    measured = result(
        "unbatched",
        ("requests_per_s", "cpu_us_per_request"),
        penstock=[{"requests_per_s": 10.0}, {"requests_per_s": 30.0}],
        kafka=[{"requests_per_s": 40.0, "cpu_us_per_request": 8.0}],
    )
    requests, cpu = ratio_rows([measured], "penstock", ["kafka", "nats"])
    assert (requests.ours, requests.peers) == (20.0, (Beside(40.0, 0.5, 40.0), Beside(None, None)))
    assert not requests.metric.is_win(0.5)
    assert requests.metric.is_win(1.0)
    assert (cpu.ours, cpu.peers[0]) == (None, Beside(8.0, None, 8.0))
    assert cpu.metric.is_win(0.9)


def test_the_table_names_each_scenario_once() -> None:
    measured = result(
        "start", ("start_to_ack_s", "idle_rss_mb"), penstock=[{"start_to_ack_s": 0.1, "idle_rss_mb": 40}]
    )
    table = results_table(ratio_rows([measured], "penstock", ()), "penstock", ())
    assert [list(column.cells) for column in table.columns] == [
        ["title of start", ""],
        ["exec to first ack s", "idle RSS MB"],
        ["0.100", "40.0"],
    ]


def test_goals_against_the_peer_need_the_peer() -> None:
    figures = {
        "penstock": {"unbatched": {"cpu_us_per_request": 12.0}, "start": {"start_to_ack_s": 0.25}},
        "kafka": {"unbatched": {"cpu_us_per_request": 24.0}},
    }
    alone = check_goals(figures, "penstock", None)
    assert [(v.goal.metric, v.reached) for v in alone] == [("start_to_ack_s", False)]
    beside = check_goals(figures, "penstock", "kafka")
    assert [(v.goal.metric, v.value, v.reached) for v in beside] == [
        ("start_to_ack_s", 0.25, False),
        ("cpu_us_per_request", 0.5, True),
    ]


def test_the_document_holds_every_round_and_the_ratios() -> None:
    measured = result(
        "start", ("idle_rss_mb",), penstock=[{"idle_rss_mb": 50.0}], kafka=[{"idle_rss_mb": 1000.0}]
    )
    document = json.loads(
        json.dumps(json_document([measured], ["penstock", "kafka"], [], {"machine": {"cores": 2}}))
    )
    (scenario,) = document["results"]
    assert document["machine"] == {"cores": 2}
    assert scenario["ratio"] == {"kafka": {"idle_rss_mb": 0.05}}
    assert scenario["rounds"]["kafka"] == [{"idle_rss_mb": 1000.0}]
    assert figures_of([measured], ["kafka"]) == {"kafka": {"start": {"idle_rss_mb": 1000.0}}}


def test_cost_counts_bytes_in_and_out_and_requests_of_both_kinds() -> None:
    window = Window(
        wall_s=2.0,
        broker_cpu_s=1.0,
        clients_cpu_s=2.0,
        machine_cpu_s=3.5,
        produced=Counters(1000, 500_000),
        consumed=Counters(250, 500_000),
    )
    batched = throughput_metrics(window, 1000.0, batched=True)
    assert batched["mb_per_s"] == 250.0
    assert batched["cpu_s_per_gb"] == 1.0
    assert "cpu_us_per_request" not in batched
    assert (batched["broker_cores"], batched["client_cores"], batched["other_cores"]) == (0.5, 1.0, 0.25)
    assert throughput_metrics(window, 1000.0, batched=False)["cpu_us_per_request"] == 800.0


def test_end_to_end_joins_what_was_due_with_what_arrived() -> None:
    due = Timeline(int64s())
    due.events.extend((0, 10, 1_000, 1, 10, 2_000))
    arrived = [((1, 10), 2_500), ((0, 10), 1_700), ((0, 11), 9_999)]
    assert sorted(end_to_end(due.by_offset(), arrived)) == [500, 700]


def test_scenario_names_are_unique_and_show_known_metrics() -> None:
    scenarios = [
        *single().scenarios,
        *cluster().scenarios,
        *queue().scenarios,
        *secure().scenarios,
        *neighbours().scenarios,
    ]
    names = [scenario.name for scenario in scenarios]
    assert len(names) == len(set(names))
    assert {name for scenario in scenarios for name in scenario.shown} <= METRICS.keys()


def test_goals_and_plots_are_of_what_is_measured() -> None:
    measured = {
        (s.name, metric)
        for s in (
            *single().scenarios,
            *cluster().scenarios,
            *queue().scenarios,
            *secure().scenarios,
            *neighbours().scenarios,
        )
        for metric in s.shown
    }
    assert {(goal.scenario, goal.metric) for goal in GOALS} <= measured
    assert {(point[1], point[2]) for _, _, points in PANELS for point in points} <= measured


def test_every_attack_of_hostile_clients_has_goals_that_are_checked() -> None:
    assert {goal.scenario for goal in HOSTILE_GOALS} == hostile._ATTACKS.keys()
    assert {goal.metric for goal in HOSTILE_GOALS} <= METRICS.keys()
    figures = {"penstock": {"records": {"p99_ratio": 3.5, "rss_growth_mb": 100.0}}}
    verdicts = check_goals(figures, "penstock", None, HOSTILE_GOALS)
    assert [(v.goal.metric, v.reached) for v in verdicts] == [("p99_ratio", False), ("rss_growth_mb", True)]
    assert [document["reached"] for document in goal_documents(verdicts)] == [False, True]


def test_the_worst_round_stands_behind_the_median() -> None:
    rounds: list[dict[str, float]] = [{"mb_per_s": rate, "failover_s": 100 / rate} for rate in (50, 10, 20)]
    measured = result("rf3-1p", ("mb_per_s", "failover_s"), penstock=rounds)
    assert measured.worst("penstock") == {"mb_per_s": 10, "failover_s": 10}
    table = results_table(ratio_rows([measured], "penstock", ()), "penstock", ())
    assert list(table.columns[2].cells) == ["20.0 (10.0)", "5.00 (10.00)"]


def test_a_neighbour_that_took_part_of_a_core_is_named() -> None:
    quiet = result("start", (), penstock=[{"other_cores": 0.1}])
    noisy = result(
        "unbatched", (), penstock=[{"other_cores": 0.1}], kafka=[{"other_cores": 0.1}, {"other_cores": 0.9}]
    )
    assert disturbed([quiet, noisy]) == ["kafka in unbatched"]


def test_peers_side_by_side_have_a_column_and_a_ratio_each() -> None:
    rounds: dict[str, list[dict[str, float]]] = {
        "penstock": [{"mb_per_s": 10.0}],
        "kafka": [{"mb_per_s": 5.0}],
        "nats": [{"mb_per_s": 20.0}],
    }
    measured = result("share", ("mb_per_s",), **rounds)
    peers = ["kafka", "nats"]
    table = results_table(ratio_rows([measured], "penstock", peers), "penstock", peers)
    assert [str(next(iter(column.cells))) for column in table.columns[2:]] == [
        "10.0",
        "5.0",
        "2.00x",
        "20.0",
        "0.50x",
    ]
