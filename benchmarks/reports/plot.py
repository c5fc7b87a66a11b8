"""One picture of a run: the two brokers side by side, panel by panel."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports.goals import Figures

_COLOURS = {"penstock": "#1b7f79", "kafka": "#b0b7bf", "nats": "#7a8fc2"}
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_BARS = 0.76

#: Label, scenario, metric, and a factor that brings the value into the panel's unit.
Point = tuple[str, str, str, float]


def _by_codec(prefix: str, metric: str, factor: float) -> list[Point]:
    return [(codec, f"{prefix}-{codec}", metric, factor) for codec in _CODECS]


def _by_flush(metric: str) -> list[Point]:
    spreads = {"1p": "1 part.", "1000p": "1,000 p.", "librdkafka": "librdk."}
    flushes = {"": "as shipped", "-never": "page cache"}
    return [
        (f"{where}\n{how}", f"rf3-{spread}{flush}", metric, 1)
        for spread, where in spreads.items()
        for flush, how in flushes.items()
    ]


def _paced(metric: str) -> list[Point]:
    return [
        (f"{where}\n{how}", f"rf3-latency-{spread}{flush}", metric, 1)
        for spread, where in (("1p", "1 part."), ("1000p", "1,000 p."))
        for flush, how in (("", "as shipped"), ("-never", "page cache"))
    ]


def _by_fault(metric: str, client: str) -> list[Point]:
    faults = {"kill": "kill -9", "freeze": "freeze", "cut": "cut network"}
    return [(title, f"failover-{fault}{client}", f"{metric}_s", 1) for fault, title in faults.items()]


def _by_transaction(metric: str) -> list[Point]:
    shapes = [(f"{r} x {n}", f"txn-{r}r-{n}p") for n in (1, 3) for r in (1, 10, 100)]
    variants = [("10 x 3\nolder", "txn-10r-3p-older"), ("10 x 3\nsynced", "txn-10r-3p-synced")]
    return [(label, name, metric, 1) for label, name in (*shapes, *variants)]


def _by_event(kind: str) -> list[Point]:
    events = {
        "all": "first 99",
        "join": "join",
        "partitions": "more\npart.",
        "leave": "leave",
        "crash": "crash",
    }
    return [(title, f"rebalance-{kind}", f"rebalance_{event}_s", 1) for event, title in events.items()]


def _by_queue(metric: str, factor: float) -> list[Point]:
    kinds = {
        "4c": "4 cons.",
        "1c": "1 cons.",
        "4c-accepted": "all\naccepted",
        "4c-1p": "1 part.",
        "4c-apart": "apart",
        "4c-synced": "4 cons.\nsynced",
        "1c-synced": "1 cons.\nsynced",
    }
    return [(title, f"share-ack-{kind}", metric, factor) for kind, title in kinds.items()]


def _by_attack(metric: str) -> list[Point]:
    attacks = {
        "smallest": "small",
        "largest": "large",
        "connections": "conn.",
        "metadata": "meta.",
        "fetches": "fetch",
        "transactions": "txn",
        "rebalances": "reb.",
        "bombs": "bombs",
        "handshakes": "TLS",
    }
    return [(title, f"neighbour-{attack}", metric, 1) for attack, title in attacks.items()]


def _by_set_up(metric: str) -> list[Point]:
    kinds = {"plain": "none", "sasl": "SASL", "tls": "TLS", "tls-sasl": "TLS and\nSASL"}
    return [(title, f"connect-{kind}", metric, 1) for kind, title in kinds.items()]


PANELS: tuple[tuple[str, str, list[Point]], ...] = (
    ("Messages of 100 B, in and out at once", "million/s", _by_codec("raw-100B", "records_per_s", 1e-6)),
    ("Messages of 1 KB, in and out at once", "thousand/s", _by_codec("raw-1KB", "records_per_s", 1e-3)),
    ("librdkafka, messages of 100 B", "million/s", _by_codec("librdkafka-100B", "records_per_s", 1e-6)),
    (
        "Broker CPU per GB moved (lower is better)",
        "CPU-seconds",
        [*_by_codec("raw-100B", "cpu_s_per_gb", 1), ("1 M/s\noffered", "offered-1M", "cpu_s_per_gb", 1)],
    ),
    (
        "One record per request",
        "thousand requests/s",
        [
            ("raw", "unbatched", "requests_per_s", 1e-3),
            ("librdkafka", "unbatched-librdkafka", "requests_per_s", 1e-3),
            ("synced", "fsync-unbatched", "requests_per_s", 1e-3),
        ],
    ),
    (
        "Broker CPU per request (lower is better)",
        "microseconds",
        [
            ("raw", "unbatched", "cpu_us_per_request", 1),
            ("librdkafka", "unbatched-librdkafka", "cpu_us_per_request", 1),
            ("synced", "fsync-unbatched", "cpu_us_per_request", 1),
        ],
    ),
    (
        "Produce p99 (lower is better)",
        "ms",
        [
            ("2,000/s", "latency-fixed", "produce_p99_ms", 1),
            ("half load\n1 record", "latency-half-unbatched", "produce_p99_ms", 1),
            ("half load\n64 KB", "latency-half-batched", "produce_p99_ms", 1),
            ("200/s\nsynced", "latency-fsync", "produce_p99_ms", 1),
        ],
    ),
    ("Exec to first acknowledged record", "seconds", [("", "start", "start_to_ack_s", 1)]),
    ("Idle memory (RSS)", "MB", [("", "start", "idle_rss_mb", 1)]),
    ("RF 3, acks=all, messages of 1 KB", "MB/s", _by_flush("mb_per_s")),
    ("RF 3: CPU of all nodes per GB (lower is better)", "CPU-seconds", _by_flush("cluster_cpu_s_per_gb")),
    ("RF 3, 500 requests/s: produce p50 (lower is better)", "ms", _paced("produce_p50_ms")),
    ("RF 3, 500 requests/s: produce p99 (lower is better)", "ms", _paced("produce_p99_ms")),
    ("Fail-over of a leader, median (lower is better)", "seconds", _by_fault("failover", "")),
    ("Fail-over of a leader, worst (lower is better)", "seconds", _by_fault("failover_worst", "")),
    (
        "Fail-over of leader and controller, worst (lower is better)",
        "seconds",
        _by_fault("failover_controller_worst", ""),
    ),
    (
        "Fail-over seen by a default librdkafka (lower is better)",
        "seconds",
        _by_fault("failover_default_client", "-librdkafka"),
    ),
    (
        "With TLS: broker CPU per GB moved (lower is better)",
        "CPU-seconds",
        [("raw, 1 KB", "tls-batched", "cpu_s_per_gb", 1)],
    ),
    (
        "With TLS: broker CPU per request (lower is better)",
        "microseconds",
        [("raw, 1 record", "tls-unbatched", "cpu_us_per_request", 1)],
    ),
    (
        "SASL, rules and quotas: CPU over none (lower is better)",
        "ratio",
        [
            ("batched", "sasl-batched", "security_cpu_ratio", 1),
            ("1 record", "sasl-unbatched", "security_cpu_ratio", 1),
        ],
    ),
    ("Beside a noisy neighbour: produce p99, times that alone", "ratio", _by_attack("p99_ratio")),
    ("Beside a noisy neighbour: produce p99 (lower is better)", "ms", _by_attack("attacked_p99_ms")),
    ("Connection set-ups", "per second", _by_set_up("connections_per_s")),
    ("Broker CPU per set-up (lower is better)", "microseconds", _by_set_up("cpu_us_per_connection")),
    (
        "Idle, 1,000 partitions of RF 3, all nodes",
        "% of a core",
        [("", "rf3-idle-1000p", "idle_cpu_percent", 1)],
    ),
    ("Acknowledgements, random outcomes", "thousand/s", _by_queue("acks_per_s", 1e-3)),
    ("Broker CPU per acknowledgement (lower is better)", "microseconds", _by_queue("cpu_us_per_ack", 1)),
    ("100 members, KIP-848, eager (lower is better)", "seconds", _by_event("consumer-eager")),
    ("100 members, KIP-848, as told (lower is better)", "seconds", _by_event("consumer")),
    (
        "100 members, classic, eager (lower is better)",
        "seconds",
        [point for point in _by_event("classic-eager") if "partitions" not in point[2]],
    ),
    ("Transactions, by records x partitions", "per second", _by_transaction("txn_per_s")),
    ("Broker CPU per transaction (lower is better)", "microseconds", _by_transaction("cpu_us_per_txn")),
)


def save_plot(figures: Figures, brokers: Sequence[str], title: str, path: Path) -> None:
    """Panels without a figure are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in map(_with_figures(figures), PANELS) if panel[2]]
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5 * columns, 3.4 * lines + 0.8), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel, figures, brokers)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    legend = {
        label: bars
        for axis in axes.flat
        for bars, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(legend.values(), legend, loc="upper right", ncols=len(brokers), frameon=False, fontsize=11)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


_Panel = tuple[str, str, list[Point]]


def _with_figures(figures: Figures) -> Callable[[_Panel], _Panel]:
    def measured(point: Point) -> bool:
        return any(point[2] in scenarios.get(point[1], {}) for scenarios in figures.values())

    return lambda panel: (panel[0], panel[1], [point for point in panel[2] if measured(point)])


def _draw(axis: Any, panel: _Panel, figures: Figures, brokers: Sequence[str]) -> None:
    title, unit, points = panel
    present = [
        broker for broker in brokers if any(point[2] in figures[broker].get(point[1], {}) for point in points)
    ]
    width = _BARS / len(present)
    for index, broker in enumerate(present):
        at = [position + (index - (len(present) - 1) / 2) * width for position in range(len(points))]
        values = [
            figures[broker].get(scenario, {}).get(metric, 0) * factor
            for _, scenario, metric, factor in points
        ]
        bars = axis.bar(at, values, width, label=broker.capitalize(), color=_COLOURS[broker])
        axis.bar_label(
            bars, labels=[short(value) if value else "" for value in values], padding=2, fontsize=8
        )
    axis.set_xticks(range(len(points)), [label for label, *_ in points], fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylabel(unit, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)
    axis.set_xlim(-0.75, max(len(points) - 0.25, 0.75))


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
