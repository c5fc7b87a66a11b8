"""A folder that is missing at the start: lost with its records, or never created."""

import pytest

from penstock.broker.partition.replica_manager import is_lost_without_folder
from penstock.cluster.image import PartitionState


def state(
    *, isr: tuple[int, ...], elr: tuple[int, ...] = (), replicas: tuple[int, ...] = (1, 2, 3)
) -> PartitionState:
    """As after a power loss of all nodes: they have registered again, which has changed the epochs."""
    return PartitionState(
        replicas, isr, leader=-1, leader_epoch=2, partition_epoch=3, directories=(), elr=elr
    )


@pytest.mark.parametrize("members", [{"isr": (1,)}, {"isr": (), "elr": (1, 2)}])
def test_a_replica_that_counts_is_lost_with_its_folder(members: dict[str, tuple[int, ...]]) -> None:
    assert is_lost_without_folder(state(**members), 1, has_held=True)


def test_a_topic_that_was_created_just_before_a_power_loss_begins_empty() -> None:
    """All nodes lose power after the topic is committed and before its folders are on disk: nothing can be lost.

    If all of them took their folders for lost, the partition would never have a leader again.
    """
    assert not is_lost_without_folder(state(isr=(1, 2, 3)), 1, has_held=False)


def test_a_replica_that_does_not_count_fetches_again() -> None:
    assert not is_lost_without_folder(state(isr=(2, 3)), 1, has_held=True)


def test_the_only_replica_is_not_replaced_by_others() -> None:
    assert not is_lost_without_folder(state(isr=(1,), replicas=(1,)), 1, has_held=True)
