"""Fixtures for the tests of replays."""

from typing import Any

import pytest
from tests.spark.replay.replays import Replays
from tests.spark.source.topics import Topics


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def replays(spark: Any, topics: Topics) -> Replays:
    return Replays(spark, topics)
