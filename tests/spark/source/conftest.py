"""Fixtures for the tests of the source."""

from typing import Any

import pytest
from tests.spark.source.topics import Topics


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)
