"""The statistics of the published figures."""

import pytest
from benchmarks.reports.stats import latency_summary, median, median_metrics, percentile, ratio


def test_percentiles_are_observed_values_by_nearest_rank() -> None:
    ordered = list(range(1, 101))
    assert [percentile(ordered, p) for p in (50, 99, 99.9, 100)] == [50, 99, 100, 100]
    assert percentile([7], 50) == 7


def test_the_smallest_percentile_is_the_smallest_value() -> None:
    assert percentile([3, 4, 5], 0) == 3


def test_latency_summary_is_in_milliseconds_and_sorts_for_itself() -> None:
    summary = latency_summary([3_000_000, 1_000_000, 2_000_000], "produce")
    assert summary["produce_p50_ms"] == 2
    assert summary["produce_max_ms"] == 3
    assert latency_summary([], "produce") == {}


@pytest.mark.parametrize(("values", "expected"), [([3], 3), ([1, 9], 5), ([9, 1, 2], 2)])
def test_median(values: list[float], expected: float) -> None:
    assert median(values) == expected


def test_median_metrics_uses_the_rounds_that_have_the_metric() -> None:
    rounds = [{"a": 1.0, "b": 5.0}, {"a": 3.0}]
    assert median_metrics(rounds) == {"a": 2.0, "b": 5.0}


def test_ratio_needs_both_sides() -> None:
    assert ratio(1, 4) == 0.25
    assert ratio(None, 4) is None
    assert ratio(1, None) is None
    assert ratio(1, 0) is None
