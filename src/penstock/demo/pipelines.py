"""The pipelines of the demo, declared as users declare their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.demo.names import (
    ARCHIVE_PIPELINE,
    CLEAN,
    CLEAN_PIPELINE,
    ORDERS,
    REVENUE,
    REVENUE_PIPELINE,
    Folders,
)
from penstock.demo.shop import PriceList
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.pipelines.declaration import DeadLetter, Errors, Pipeline, RowFunction, pipeline
from penstock.spark.pipelines.parsers import json_rows

#: Orders as the shop writes them; a record that does not match is a dead letter at once.
_ORDER: Final = (
    "id STRING NOT NULL, customer STRING NOT NULL, product STRING NOT NULL, quantity INT NOT NULL, "
    "placed_ms BIGINT NOT NULL, paid_ms BIGINT NOT NULL"
)
_PRICED: Final = "id STRING, customer STRING, product STRING, quantity INT, total DOUBLE, placed_ms BIGINT"
_WINDOW: Final = "10 seconds"
_WATERMARK: Final = "5 seconds"
#: A payment arrives within some seconds, before the last attempt.
_ERRORS: Final = Errors(attempts=5, backoff=ExponentialBackoff(base_ms=2_000, cap_ms=16_000))


class NotPaid(Exception):
    """Goes away by itself, so a retry can succeed."""


class NoPrice(DeadLetter):
    """Remains until the price is entered, so a retry cannot succeed."""


class Pricing:
    """The row function: adds the total price to an order."""

    def __init__(self, path: Path) -> None:
        self._prices = PriceList(path)

    def __call__(self, order: dict[str, Any]) -> Mapping[str, Any]:
        price = self._prices.all().get(order["product"])
        if price is None:
            raise NoPrice(f"no price for {order['product']} (order {order['id']})")
        if order["paid_ms"] > time.time() * 1000:
            raise NotPaid(f"order {order['id']} is not paid yet")
        return {**order, "total": round(price * order["quantity"], 2)}


def clean_orders(prices: Path) -> Pipeline:
    """Parses and prices each order exactly once; orders that fail are retried or become dead letters."""
    declare = pipeline(
        CLEAN_PIPELINE,
        source=ORDERS,
        sink=CLEAN,
        delivery="exactly-once",
        parse=json_rows(_ORDER),
        rows=[RowFunction(call=Pricing(prices), schema=_PRICED)],
        errors=_ERRORS,
    )
    return declare(lambda orders: orders)


def sum_revenue() -> Pipeline:
    """Sums the revenue of each product; orders that were sent twice count once."""
    declare = pipeline(
        REVENUE_PIPELINE, source=CLEAN, sink=REVENUE, delivery="exactly-once", every="2s", stateful=True
    )
    return declare(_revenue_per_product)


def _revenue_per_product(orders: Any) -> Any:
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


def archive_orders(folders: Folders) -> Pipeline:
    """Keeps the orders for good, in a table that other tools can read."""
    from penstock.spark.archive import archive

    folders.schema.write_text(_PRICED)
    return archive(CLEAN, str(folders.archive), schema=folders.schema, name=ARCHIVE_PIPELINE, every="5s")


def demo_pipelines(folders: Folders) -> list[Pipeline]:
    """All pipelines; the one that the others read from is first."""
    return [clean_orders(folders.prices), sum_revenue(), archive_orders(folders)]
