"""Fixtures of the tests of replays."""

from typing import Any

import pytest
from tests.spark.replay.desk import Desk
from tests.spark.source.topics import Topics


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def desk(spark: Any, topics: Topics) -> Desk:
    return Desk(spark, topics)
