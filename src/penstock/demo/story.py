"""The lines of the demo's tree, in the order in which they are shown, with the current figures of its components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.demo import names
from penstock.demo.component import Component
from penstock.demo.processes import INSTALL_HINT, BrokerProcess, SparkProcess, missing_packages
from penstock.demo.scene import (
    EventLog,
    Flow,
    FlowKind,
    GroupLags,
    Health,
    RateMeter,
    Sale,
    Scene,
    TopicCounter,
)
from penstock.demo.shop import Shop
from penstock.demo.subscribers import Billing, Shipping

RETRIES: Final = "orders.retry"
PARCEL_RETRIES: Final = "parcels.retry"
LAKE: Final = "lake/orders"
REPLAY_LINE: Final = "replay ─▶ orders"
RESHIP_LINE: Final = "reship ─▶ shipping"
#: Windows of ten seconds in the minute that is shown.
_WINDOWS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """All components of the demo."""

    broker: BrokerProcess
    shop: Shop
    billing: Billing
    shipping: Shipping
    tally: TopicCounter
    lags: GroupLags
    #: None if Spark is not installed or not wanted.
    spark: SparkProcess | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    kind: FlowKind
    last: tuple[bool, ...]
    note: str


_LINES: Final = (
    _Line(name="shop", kind=FlowKind.SHOP, last=(), note="some broken, some twice"),
    _Line(name=names.ORDERS, kind=FlowKind.TOPIC, last=(True,), note=f"topic, {names.PARTITIONS} partitions"),
    _Line(name=names.BILLING, kind=FlowKind.SUBSCRIBER, last=(True, False), note="plain subscriber group"),
    _Line(name=names.PARCELS, kind=FlowKind.TOPIC, last=(True, False), note="packed exactly once"),
    _Line(name=names.SHIPPING, kind=FlowKind.SUBSCRIBER, last=(True, False, True), note="app, at least once"),
    _Line(
        name=PARCEL_RETRIES,
        kind=FlowKind.TROUBLE,
        last=(True, False, True, False),
        note="carrier busy, again soon",
    ),
    _Line(
        name=names.PARCEL_DEAD_LETTERS,
        kind=FlowKind.TROUBLE,
        last=(True, False, True, True),
        note="the road is closed",
    ),
    _Line(
        name=RESHIP_LINE,
        kind=FlowKind.REPLAY,
        last=(True, False, True, True, True),
        note="once the road is open",
    ),
    _Line(name=names.CLEAN_PIPELINE, kind=FlowKind.SPARK, last=(True, True), note="exactly once"),
    _Line(name=names.CLEAN, kind=FlowKind.TOPIC, last=(True, True, False), note="parsed and priced"),
    _Line(
        name=names.REVENUE_PIPELINE,
        kind=FlowKind.SPARK,
        last=(True, True, False, False),
        note="no duplicates",
    ),
    _Line(
        name=names.REVENUE,
        kind=FlowKind.TOPIC,
        last=(True, True, False, False, True),
        note="per product, 10 s",
    ),
    _Line(
        name=names.ARCHIVE_PIPELINE, kind=FlowKind.SPARK, last=(True, True, False, True), note="exactly once"
    ),
    _Line(name=LAKE, kind=FlowKind.TABLE, last=(True, True, False, True, True), note="Delta table"),
    _Line(name=RETRIES, kind=FlowKind.TROUBLE, last=(True, True, False), note="not paid yet, again soon"),
    _Line(
        name=names.DEAD_LETTERS,
        kind=FlowKind.TROUBLE,
        last=(True, True, True),
        note="poison, or no price yet",
    ),
    _Line(name=REPLAY_LINE, kind=FlowKind.REPLAY, last=(True, True, True, True), note="once it has a price"),
)


class Story:
    def __init__(self, cast: Components, journal: EventLog, *, data: str) -> None:
        self._cast = cast
        self._journal = journal
        self._data = data
        self._meters: dict[str, RateMeter] = {line.name: RateMeter() for line in _LINES}

    def scene(self) -> Scene:
        """The current scene. Call it regularly, because rates are computed from earlier calls."""
        totals = self._totals()
        self._feed(totals)
        cast, tally = self._cast, self._cast.tally
        dropped = 0 if cast.spark is None else cast.spark.state.queries[names.REVENUE_PIPELINE].dropped
        return Scene(
            now_s=self._journal.now_s,
            address=cast.broker.address or "",
            data=self._data,
            broker=Health.TROUBLED if cast.broker.trouble else Health.UP,
            spark=Health.ABSENT if cast.spark is None else cast.spark.health,
            spark_note=self._spark_note(),
            flows=tuple(self._flow(line, totals.get(line.name)) for line in _LINES),
            sales=_last_windows(tally, _WINDOWS),
            latest_dead_letter=tally.latest_dead_letter,
            dead_letters=tally.records[names.DEAD_LETTERS] + tally.records[names.PARCEL_DEAD_LETTERS],
            replayed=tally.records[names.REPLAYED] + tally.records[names.PARCELS_REPLAYED],
            duplicates_dropped=dropped,
            events=self._journal.events,
        )

    def _spark_note(self) -> str:
        spark = self._cast.spark
        if spark is None:
            return f"is not installed: {INSTALL_HINT}" if missing_packages() else "is disabled"
        return {
            Health.TROUBLED: "is restarting",
            Health.STARTING: "is starting",
        }.get(spark.health, "is up")

    def _flow(self, line: _Line, total: int | None) -> Flow:
        meter, group = self._meters[line.name], names.GROUPS.get(line.name)
        part = self._part(line.name)
        return Flow(
            name=line.name,
            last=line.last,
            kind=line.kind,
            note=self._note(line),
            per_s=meter.per_s,
            history=meter.history,
            total=total,
            lag=None if group is None else self._cast.lags.records[group],
            trouble=self._query_trouble(line.name) if part is None else part.trouble,
        )

    def _part(self, name: str) -> Component | None:
        cast = self._cast
        return {"shop": cast.shop, names.BILLING: cast.billing, names.SHIPPING: cast.shipping}.get(name)

    def _query_trouble(self, name: str) -> str | None:
        spark = self._cast.spark
        if spark is None or name not in names.PIPELINES:
            return None
        return spark.state.queries[name].trouble

    def _note(self, line: _Line) -> str:
        spark = self._cast.spark
        if line.kind is not FlowKind.SPARK:
            return line.note
        if spark is None:
            return "needs Spark"
        query = spark.state.queries[line.name]
        if not query.is_running:
            return "Spark is starting" if not spark.state.is_up else "is starting"
        pace = "" if query.batch_ms is None else f", {query.batch_ms / 1000:.1f} s"
        return f"Spark, {line.note}{pace}"

    def _totals(self) -> dict[str, int | None]:
        """The total of each line. Of the readers, only shipping has one; the others have only a lag."""
        records, spark = self._cast.tally.records, self._cast.spark
        topics = {
            name: name
            for name in (
                names.ORDERS,
                names.CLEAN,
                names.REVENUE,
                names.DEAD_LETTERS,
                names.PARCELS,
                names.PARCEL_DEAD_LETTERS,
            )
        }
        topics |= {REPLAY_LINE: names.REPLAYED, RESHIP_LINE: names.PARCELS_REPLAYED}
        waiting = [(names.retried_topic(topic), count) for topic, count in records.copy().items()]
        return {
            **{line: records[topic] for line, topic in topics.items()},
            RETRIES: sum(count for source, count in waiting if source == names.ORDERS),
            PARCEL_RETRIES: sum(count for source, count in waiting if source == names.PARCELS),
            names.SHIPPING: self._cast.shipping.handled,
            LAKE: None if spark is None else spark.state.archived,
        }

    def _feed(self, totals: Mapping[str, int | None]) -> None:
        readers = {names.BILLING: self._cast.billing.read, names.SHIPPING: self._cast.shipping.handled}
        if self._cast.spark is not None:
            readers |= {name: query.rows for name, query in self._cast.spark.state.queries.items()}
        counted = totals if self._cast.tally.is_current else {}
        for name, total in {**counted, **readers}.items():
            if total is not None:
                self._meters[name].feed(total, self._journal.now_s)


def _last_windows(tally: TopicCounter, count: int) -> tuple[Sale, ...]:
    sales = list(tally.sales)
    windows = list(dict.fromkeys(sale.window for sale in sales))[-count:]
    return tuple(sale for sale in sales if sale.window in windows)
