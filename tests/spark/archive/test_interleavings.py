"""Every record is archived once if drivers die, are late or start over: seeded orders of steps on real tables."""

import pytest
from tests.spark.archive.mutations import WITH_TOPIC, WITHOUT_TOPIC
from tests.spark.archive.worlds import first_flaw

SEEDS = range(8)
#: The number of worlds that is enough to detect each mutation.
MUTATED_SEEDS = range(60)


@pytest.mark.parametrize("counts_offsets", [True, False], ids=["of a topic", "of batches only"])
def test_every_row_is_archived_once(counts_offsets):
    assert first_flaw(SEEDS, None, counts_offsets=counts_offsets) is None


@pytest.mark.parametrize("mutation", WITH_TOPIC)
def test_a_removed_safeguard_is_detected_with_end_offsets(mutation):
    assert first_flaw(MUTATED_SEEDS, mutation, counts_offsets=True)


@pytest.mark.parametrize("mutation", WITHOUT_TOPIC)
def test_a_removed_safeguard_is_detected_with_batch_numbers(mutation):
    assert first_flaw(MUTATED_SEEDS, mutation, counts_offsets=False)
