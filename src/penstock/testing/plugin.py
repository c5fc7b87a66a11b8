"""The pytest plugin that users get by installing the package: a broker for their tests.

    def test_orders(penstock):
        penstock.create_topic("orders")
        run_my_application(penstock.bootstrap_servers)

`penstock` is a fresh broker for each test: it is empty, and the test may stop it, kill it and inject faults into it.
`penstock_session` is one broker for the whole run (for each worker of pytest-xdist); use
`penstock_session.new_topic()` and `unique_name()` there. Both are `penstock.testing.EmbeddedBroker` and run in
a thread, so asyncio tests can use them as they are. To give them settings, define the fixture
`penstock_settings` in your conftest.py:

    @pytest.fixture(scope="session")
    def penstock_settings():
        return {"num.partitions": 3}

To test an application that logs in, define the fixture `penstock_secure` in the same way, which returns True. Clients
then need `penstock.client_settings()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="session")
def penstock_settings() -> Mapping[str, Any]:
    """Settings of the brokers for tests, with the names that Kafka uses. Override this fixture to set some."""
    return {}


@pytest.fixture(scope="session")
def penstock_secure() -> bool:
    """Whether brokers for tests need TLS and a password, and check access rules. Override this fixture."""
    return False


@pytest.fixture
def penstock(penstock_settings: Mapping[str, Any], penstock_secure: bool) -> Iterator[EmbeddedBroker]:
    """A fresh Kafka-compatible broker for this test alone: `penstock.bootstrap_servers`."""
    yield from _broker(penstock_settings, penstock_secure)


@pytest.fixture(scope="session")
def penstock_session(penstock_settings: Mapping[str, Any], penstock_secure: bool) -> Iterator[EmbeddedBroker]:
    """One Kafka-compatible broker for all tests; `penstock_session.new_topic()` keeps their topics apart."""
    yield from _broker(penstock_settings, penstock_secure)


def _broker(settings: Mapping[str, Any], secure: bool) -> Iterator[EmbeddedBroker]:
    # pytest loads this plugin in every run wherever the package is installed; only tests that use a broker import it.
    from penstock.testing.embedded import EmbeddedBroker

    with EmbeddedBroker(settings=settings, secure=secure) as broker:
        yield broker
