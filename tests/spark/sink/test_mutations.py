"""Each safeguard of the sink taken out is noticed: seeds that are known to find it, and others where they do not.

`make chaos ARGS="--campaign sink"` looks with many more, and kills drivers of real Spark.
"""

import pytest
from tests.spark.sink.campaign import first_flaw
from tests.spark.sink.mutations import MUTATIONS
from tests.spark.source.topics import Topics

SEEDS = {
    "no look-up": 2,
    "no fencing": 65,
    "no sweep": 0,
    "no question": 0,
    "idle ids live": 33,
    "early abort": 12,
    "one name": 26,
    "decides outside": 0,
}


def test_every_mutation_has_a_seed():
    assert SEEDS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("mutation", SEEDS)
def test_a_safeguard_that_is_taken_out_is_noticed(broker, mutation):
    topics = Topics(broker.bootstrap_servers)
    assert first_flaw(topics, [SEEDS[mutation], *range(300)], mutation) is not None
