"""Percentiles, medians and ratios: the arithmetic of the report, without any I/O."""

import math
from collections.abc import Iterable, Mapping, Sequence

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9, "max": 100.0}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was really observed. `ordered` is sorted and not empty."""
    assert ordered, "no percentile of nothing"
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def latency_summary(latencies_ns: Iterable[int], prefix: str) -> dict[str, float]:
    """The percentiles in milliseconds, named `<prefix>_p99_ms`; empty when nothing was observed."""
    ordered = sorted(latencies_ns)
    if not ordered:
        return {}
    return {f"{prefix}_{name}_ms": percentile(ordered, p) / 1e6 for name, p in PERCENTILES.items()}


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_metrics(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each metric over the rounds that have it."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics)
    return {name: median([metrics[name] for metrics in rounds if name in metrics]) for name in names}


def worst_metrics(
    rounds: Sequence[Mapping[str, float]], higher_is_better: Mapping[str, bool]
) -> dict[str, float]:
    """The worst of each metric that is better one way or the other."""
    names = dict.fromkeys(name for metrics in rounds for name in metrics if name in higher_is_better)
    return {
        name: (min if higher_is_better[name] else max)(m[name] for m in rounds if name in m) for name in names
    }


def ratio(ours: float | None, peer: float | None) -> float | None:
    return ours / peer if ours is not None and peer else None
