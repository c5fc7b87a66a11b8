"""The row function of the demo: results, retries and dead letters."""

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.demo.names import Folders
from penstock.demo.pipelines import NoPrice, NotPaid, Pricing, clean_orders, sum_revenue
from penstock.demo.shop import PriceList, special_offer
from penstock.spark.pipelines.declaration import DeadLetter


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(root=tmp_path)


def order(**changes: Any) -> dict[str, Any]:
    usual = {"id": "o-1", "customer": "c-1", "product": "bread", "quantity": 2, "placed_ms": 1, "paid_ms": 1}
    return usual | changes


def test_an_order_that_is_paid_gets_its_total(folders: Folders) -> None:
    assert Pricing(folders.prices)(order())["total"] == 6.4


def test_an_order_that_is_not_paid_is_tried_again(folders: Folders) -> None:
    with pytest.raises(NotPaid, match="o-1") as caught:
        Pricing(folders.prices)(order(paid_ms=time.time() * 1000 + 60_000))
    assert not isinstance(caught.value, DeadLetter)


def test_an_order_without_a_price_is_a_dead_letter_until_there_is_one(folders: Folders) -> None:
    pricing = Pricing(folders.prices)
    with pytest.raises(NoPrice, match="special offer 1") as caught:
        pricing(order(product=special_offer(1)))
    assert isinstance(caught.value, DeadLetter)
    PriceList(folders.prices).add_special()
    assert pricing(order(product=special_offer(1)))["total"] > 0


def test_the_last_attempt_comes_after_the_last_payment(folders: Folders) -> None:
    from penstock.demo.shop import PAYMENT_MS

    errors = clean_orders(folders.prices).errors
    waits_ms = [
        min(errors.backoff.cap_ms, errors.backoff.base_ms * 2**tried) for tried in range(errors.attempts - 1)
    ]
    assert sum(waits_ms) > PAYMENT_MS[1]


def test_the_second_pipeline_reads_what_the_first_one_writes(folders: Folders) -> None:
    sink = clean_orders(folders.prices).sink
    assert sink is not None
    assert sink.describe() == sum_revenue().source.describe()
