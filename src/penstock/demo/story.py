"""What belongs to the story, in the order in which it is told, with what the parts know of it at present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.demo.billing import Billing
from penstock.demo.broker import Broker
from penstock.demo.journal import Journal
from penstock.demo.lags import Lags
from penstock.demo.meters import Meter
from penstock.demo.names import (
    ARCHIVING,
    BILLING,
    CLEAN,
    CLEANING,
    GROUPS,
    LETTERS,
    ORDERS,
    PARCEL_LETTERS,
    PARCELS,
    PARCELS_REPLAYED,
    PARTITIONS,
    PIPELINES,
    REPLAYED,
    REVENUE,
    SHIPPING,
    SUMMING,
    retries_of,
)
from penstock.demo.parts import Part
from penstock.demo.scene import Flow, Health, Kind, Scene
from penstock.demo.shipping import Shipping
from penstock.demo.shop import Shop
from penstock.demo.spark_child import HOW_TO_GET, Spark, missing
from penstock.demo.tally import Sale, Tally

RETRIES: Final = "orders.retry"
PARCEL_RETRIES: Final = "parcels.retry"
LAKE: Final = "lake/orders"
REPLAYING: Final = "replay ─▶ orders"
RESHIPPING: Final = "reship ─▶ shipping"
#: Windows of ten seconds that make up the minute that is shown.
_WINDOWS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """All who play."""

    broker: Broker
    shop: Shop
    billing: Billing
    shipping: Shipping
    tally: Tally
    lags: Lags
    #: None where Spark is not installed.
    spark: Spark | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    kind: Kind
    last: tuple[bool, ...]
    note: str


_LINES: Final = (
    _Line(name="shop", kind=Kind.SHOP, last=(), note="some broken, some twice"),
    _Line(name=ORDERS, kind=Kind.TOPIC, last=(True,), note=f"topic, {PARTITIONS} partitions"),
    _Line(name=BILLING, kind=Kind.SUBSCRIBER, last=(True, False), note="plain subscriber group"),
    _Line(name=PARCELS, kind=Kind.TOPIC, last=(True, False), note="packed exactly once"),
    _Line(name=SHIPPING, kind=Kind.SUBSCRIBER, last=(True, False, True), note="app, at least once"),
    _Line(
        name=PARCEL_RETRIES,
        kind=Kind.TROUBLE,
        last=(True, False, True, False),
        note="carrier busy, again soon",
    ),
    _Line(name=PARCEL_LETTERS, kind=Kind.TROUBLE, last=(True, False, True, True), note="the road is closed"),
    _Line(
        name=RESHIPPING, kind=Kind.REPLAY, last=(True, False, True, True, True), note="once the road is open"
    ),
    _Line(name=CLEANING, kind=Kind.SPARK, last=(True, True), note="exactly once"),
    _Line(name=CLEAN, kind=Kind.TOPIC, last=(True, True, False), note="parsed and priced"),
    _Line(name=SUMMING, kind=Kind.SPARK, last=(True, True, False, False), note="no duplicates"),
    _Line(name=REVENUE, kind=Kind.TOPIC, last=(True, True, False, False, True), note="per product, 10 s"),
    _Line(name=ARCHIVING, kind=Kind.SPARK, last=(True, True, False, True), note="exactly once"),
    _Line(name=LAKE, kind=Kind.TABLE, last=(True, True, False, True, True), note="Delta table"),
    _Line(name=RETRIES, kind=Kind.TROUBLE, last=(True, True, False), note="not paid yet, again soon"),
    _Line(name=LETTERS, kind=Kind.TROUBLE, last=(True, True, True), note="poison, or no price yet"),
    _Line(name=REPLAYING, kind=Kind.REPLAY, last=(True, True, True, True), note="once it has a price"),
)


class Story:
    def __init__(self, cast: Cast, journal: Journal, *, data: str) -> None:
        self._cast = cast
        self._journal = journal
        self._data = data
        self._meters: dict[str, Meter] = {line.name: Meter() for line in _LINES}

    def scene(self) -> Scene:
        """As it is now; to be asked for regularly, because rates are made of what was seen before."""
        totals = self._totals()
        self._feed(totals)
        cast, tally = self._cast, self._cast.tally
        dropped = 0 if cast.spark is None else cast.spark.told.queries[SUMMING].dropped
        return Scene(
            now_s=self._journal.now_s,
            address=cast.broker.address or "",
            data=self._data,
            broker=Health.TROUBLED if cast.broker.trouble else Health.UP,
            spark=Health.ABSENT if cast.spark is None else cast.spark.health,
            spark_note=self._spark_note(),
            flows=tuple(self._flow(line, totals.get(line.name)) for line in _LINES),
            sales=_last_windows(tally, _WINDOWS),
            letter=tally.latest_letter,
            letters=tally.records[LETTERS] + tally.records[PARCEL_LETTERS],
            replayed=tally.records[REPLAYED] + tally.records[PARCELS_REPLAYED],
            duplicates_dropped=dropped,
            events=self._journal.events,
        )

    def _spark_note(self) -> str:
        spark = self._cast.spark
        if spark is None:
            return f"is not installed: {HOW_TO_GET}" if missing() else "is left out"
        return {
            Health.TROUBLED: "is started again",
            Health.STARTING: "is starting",
        }.get(spark.health, "is up")

    def _flow(self, line: _Line, total: int | None) -> Flow:
        meter, group = self._meters[line.name], GROUPS.get(line.name)
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

    def _part(self, name: str) -> Part | None:
        cast = self._cast
        return {"shop": cast.shop, BILLING: cast.billing, SHIPPING: cast.shipping}.get(name)

    def _query_trouble(self, name: str) -> str | None:
        spark = self._cast.spark
        if spark is None or name not in PIPELINES:
            return None
        return spark.told.queries[name].trouble

    def _note(self, line: _Line) -> str:
        spark = self._cast.spark
        if line.kind is not Kind.SPARK:
            return line.note
        if spark is None:
            return "needs Spark"
        query = spark.told.queries[line.name]
        if not query.is_running:
            return "Spark is starting" if not spark.told.is_up else "is starting"
        pace = "" if query.batch_ms is None else f", {query.batch_ms / 1000:.1f} s"
        return f"Spark, {line.note}{pace}"

    def _totals(self) -> dict[str, int | None]:
        """What each line has in all; other readers than shipping tell only how far behind they are."""
        records, spark = self._cast.tally.records, self._cast.spark
        topics = {name: name for name in (ORDERS, CLEAN, REVENUE, LETTERS, PARCELS, PARCEL_LETTERS)}
        topics |= {REPLAYING: REPLAYED, RESHIPPING: PARCELS_REPLAYED}
        waiting = [(retries_of(topic), count) for topic, count in records.copy().items()]
        return {
            **{line: records[topic] for line, topic in topics.items()},
            RETRIES: sum(count for source, count in waiting if source == ORDERS),
            PARCEL_RETRIES: sum(count for source, count in waiting if source == PARCELS),
            SHIPPING: self._cast.shipping.handled,
            LAKE: None if spark is None else spark.told.archived,
        }

    def _feed(self, totals: Mapping[str, int | None]) -> None:
        readers = {BILLING: self._cast.billing.read, SHIPPING: self._cast.shipping.handled}
        if self._cast.spark is not None:
            readers |= {name: query.rows for name, query in self._cast.spark.told.queries.items()}
        counted = totals if self._cast.tally.is_current else {}
        for name, total in {**counted, **readers}.items():
            if total is not None:
                self._meters[name].feed(total, self._journal.now_s)


def _last_windows(tally: Tally, count: int) -> tuple[Sale, ...]:
    sales = list(tally.sales)
    windows = list(dict.fromkeys(sale.window for sale in sales))[-count:]
    return tuple(sale for sale in sales if sale.window in windows)
