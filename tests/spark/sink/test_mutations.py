"""Removing a safeguard of the sink is detected, with seeds that are known to detect it.

`make chaos ARGS="--campaign sink"` tries many more seeds, and kills drivers of real Spark.
"""

import pytest
from tests.spark.sink.campaign import first_flaw
from tests.spark.sink.mutations import MUTATIONS
from tests.spark.source.topics import Topics

SEEDS = {
    "no look-up": 2,
    "no fencing": 65,
    "undecided transactions stay open": 0,
    "no look-up by attempts": 0,
    "idle ids live": 33,
    "early abort": 12,
    "ids are reused in the next batch": 26,
    "the decision is not found": 0,
}


def test_every_mutation_has_a_seed():
    assert SEEDS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("mutation", SEEDS)
def test_a_removed_safeguard_is_detected(broker, mutation):
    topics = Topics(broker.bootstrap_servers)
    assert first_flaw(topics, [SEEDS[mutation], *range(300)], mutation) is not None
