"""Fixtures of the tests of `penstock dlq`."""

from collections.abc import Callable

import pytest
from tests.application.dlq.dead_letters import Office, letter
from tests.compat.conftest import answer, penstock

__all__ = ["answer", "penstock"]


@pytest.fixture
def office(bootstrap: str) -> Office:
    return Office(bootstrap)


@pytest.fixture
def orders(office: Office, unique: Callable[[str], str]) -> str:
    topic = office.create(unique("orders"), 3)
    office.create_dead(topic, 2)
    return topic


@pytest.fixture
def dead(office: Office, orders: str) -> str:
    """20 letters, the even ones in partition 0; those from 10 on failed for another reason."""
    for partition in range(2):
        numbers = range(partition, 20, 2)
        office.fill(
            f"{orders}.dlq",
            [
                letter(
                    orders,
                    n,
                    partition=n % 3,
                    dead_in=partition,
                    error="shop.errors.NoSuchColour" if n < 10 else "TimeoutError",
                )
                for n in numbers
            ],
        )
    return f"{orders}.dlq"
