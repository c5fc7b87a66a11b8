"""Each record once under seeded orders of drivers on real tables, with deaths, late steps and deleted checkpoints."""

import pytest
from tests.spark.archive.mutations import WITH_TOPIC, WITHOUT_TOPIC
from tests.spark.archive.worlds import first_flaw

SEEDS = range(8)
#: How many worlds are needed at most until one notices.
MUTATED_SEEDS = range(60)


@pytest.mark.parametrize("counts_offsets", [True, False], ids=["of a topic", "of batches only"])
def test_every_row_is_there_once(counts_offsets):
    assert first_flaw(SEEDS, None, counts_offsets=counts_offsets) is None


@pytest.mark.parametrize("mutation", WITH_TOPIC)
def test_a_safeguard_of_offsets_that_is_taken_out_is_noticed(mutation):
    assert first_flaw(MUTATED_SEEDS, mutation, counts_offsets=True)


@pytest.mark.parametrize("mutation", WITHOUT_TOPIC)
def test_a_safeguard_of_batches_that_is_taken_out_is_noticed(mutation):
    assert first_flaw(MUTATED_SEEDS, mutation, counts_offsets=False)
