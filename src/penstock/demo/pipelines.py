"""The pipelines of the demo, declared as anybody would declare their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.client.retrying import Backoff
from penstock.demo.names import ARCHIVING, CLEAN, CLEANING, ORDERS, REVENUE, SUMMING, Folders
from penstock.demo.prices import PriceList
from penstock.spark.pipelines.declaration import DeadLetter, Errors, Pipeline, RowFunction, pipeline
from penstock.spark.pipelines.parsing import json_rows

#: As the shop writes them; what does not fit is a dead letter at once.
_ORDER: Final = (
    "id STRING NOT NULL, customer STRING NOT NULL, product STRING NOT NULL, quantity INT NOT NULL, "
    "placed_ms BIGINT NOT NULL, paid_ms BIGINT NOT NULL"
)
_PRICED: Final = "id STRING, customer STRING, product STRING, quantity INT, total DOUBLE, placed_ms BIGINT"
_WINDOW: Final = "10 seconds"
_WATERMARK: Final = "5 seconds"
#: A payment comes within some seconds, sooner than the last attempt.
_ERRORS: Final = Errors(attempts=5, backoff=Backoff(base_ms=2_000, cap_ms=16_000))


class NotPaid(Exception):
    """Passes by itself: it is worth another try."""


class NoPrice(DeadLetter):
    """Does not pass until somebody enters the price."""


class Pricing:
    """The row function: an order with what it costs."""

    def __init__(self, path: Path) -> None:
        self._prices = PriceList(path)

    def __call__(self, order: dict[str, Any]) -> Mapping[str, Any]:
        price = self._prices.all().get(order["product"])
        if price is None:
            raise NoPrice(f"no price for {order['product']} (order {order['id']})")
        if order["paid_ms"] > time.time() * 1000:
            raise NotPaid(f"order {order['id']} is not paid yet")
        return {**order, "total": round(price * order["quantity"], 2)}


def cleaning(prices: Path) -> Pipeline:
    """Parsed and priced, or retried, or a dead letter; each order exactly once."""
    declare = pipeline(
        CLEANING,
        source=ORDERS,
        sink=CLEAN,
        delivery="exactly-once",
        parse=json_rows(_ORDER),
        rows=[RowFunction(call=Pricing(prices), schema=_PRICED)],
        errors=_ERRORS,
    )
    return declare(lambda orders: orders)


def summing() -> Pipeline:
    """What each product brings in, with orders that were sent twice counted once."""
    declare = pipeline(
        SUMMING, source=CLEAN, sink=REVENUE, delivery="exactly-once", every="2s", stateful=True
    )
    return declare(_per_product)


def _per_product(orders: Any) -> Any:
    from pyspark.sql import functions as F

    parsed = orders.select(F.from_json(F.col("value").cast("string"), _PRICED).alias("order"), "timestamp")
    once = parsed.select("order.*", "timestamp").withWatermark("timestamp", _WATERMARK)
    return (
        once.dropDuplicatesWithinWatermark(["id"])
        .groupBy(F.window("timestamp", _WINDOW).alias("window"), "product")
        .agg(F.count("*").alias("orders"), F.round(F.sum("total"), 2).alias("total"))
        .select(
            F.col("product").alias("key"),
            F.date_format("window.end", "HH:mm:ss").alias("window"),
            "product",
            "orders",
            "total",
        )
    )


def archiving(folders: Folders) -> Pipeline:
    """Kept for good, as a table that everybody can read."""
    from penstock.spark.archive import archive

    folders.schema.write_text(_PRICED)
    return archive(CLEAN, str(folders.archive), schema=folders.schema, name=ARCHIVING, every="5s")


def story(folders: Folders) -> list[Pipeline]:
    """All of them, the one that others read from first."""
    return [cleaning(folders.prices), summing(), archiving(folders)]
