"""`penstock cluster status`: each problem of a cluster is found, and a healthy cluster has none."""

from typing import Any

import pytest

from penstock.cli.cluster.description import ClusterDescription, PartitionDescription
from penstock.cli.cluster.status import ERROR, check_health, status_document
from penstock.cli.connection.offsets import PartitionName
from penstock.client.admin.cluster import (
    BrokerDescription,
    PartitionReassignment,
    QuorumInfo,
    QuorumReplica,
)


def broker(id: int, **changes: Any) -> BrokerDescription:
    return BrokerDescription(id, f"host-{id}", 9092, None, False)._replace(**changes)


def partition(**changes: Any) -> PartitionDescription:
    return PartitionDescription(PartitionName("orders", 0), 1, (1, 2, 3), (1, 2, 3), 2)._replace(**changes)


def quorum(*voters: int, behind: int = 0) -> QuorumInfo:
    return QuorumInfo(1, 4, 5000, tuple(QuorumReplica(id, 5000 - behind * (id != 1), 0) for id in voters), ())


def view(*partitions: PartitionDescription, **changes: Any) -> ClusterDescription:
    brokers = (broker(1), broker(2), broker(3))
    return ClusterDescription("id", quorum(1, 2, 3), brokers, partitions or (partition(),), {})._replace(
        **changes
    )


def levels(of: ClusterDescription) -> list[str]:
    return [finding.level for finding in check_health(of)]


def test_a_healthy_cluster_has_no_findings() -> None:
    assert check_health(view()) == []
    assert status_document(view(), [])["up"]
    assert status_document(view(), [])["troubles"] == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"leader": -1, "in_sync": ()}, "1 partition offline"),
        ({"in_sync": (1, 2)}, "1 partition under-replicated"),
        ({"in_sync": (1,)}, "under min.insync.replicas"),
        ({"replicas": (1, 2, 9), "in_sync": (1, 2)}, "brokers that the cluster does not know: broker 9"),
    ],
)
def test_partitions_that_are_not_as_they_should_be(changes: dict[str, Any], text: str) -> None:
    assert text in " | ".join(finding.message for finding in check_health(view(partition(**changes))))


def test_only_what_is_down_is_an_error() -> None:
    assert ERROR in levels(view(partition(leader=-1, in_sync=())))
    assert ERROR in levels(view(quorum=None))
    assert ERROR in levels(view(partition(in_sync=(1,)))), "acks=all is refused"
    assert ERROR not in levels(view(partition(in_sync=(1, 2))))
    assert ERROR not in levels(view(quorum=None, knows_quorum=False))


def test_acks_all_is_refused_while_a_partition_moves_when_its_leader_refuses_it() -> None:
    growing = partition(
        isr_min=3, in_sync=(1, 2), moving=PartitionReassignment((1, 2, 3), adding=(3,), removing=())
    )
    assert ERROR not in levels(view(growing)), "the third replica is being filled"
    shrinking = partition(in_sync=(1,), moving=PartitionReassignment((1,), adding=(), removing=(2, 3)))
    assert ERROR in levels(view(shrinking)), "two of three are asked for until it has shrunk"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quorum": quorum(1)}, "one voter holds the metadata"),
        ({"quorum": quorum(1, 2)}, "2 voters survive the loss of 0, as 1 would"),
        ({"quorum": quorum(1, 2, 3, 4)}, "4 voters survive the loss of 1, as 3 would"),
        ({"quorum": quorum(1, 2, 3, behind=2000)}, "voter 2 is 2000 records behind"),
        ({"brokers": (broker(1), broker(2), broker(3, fenced=True))}, "not in use: broker 3"),
        ({"unreachable": frozenset({2})}, "not reachable from here at the advertised address: broker 2"),
        (
            {"brokers": tuple(broker(id, host="one") for id in (1, 2, 3))},
            "all brokers are in one rack or on one host (one)",
        ),
    ],
)
def test_what_is_less_safe_than_it_looks(changes: dict[str, Any], text: str) -> None:
    assert text in " | ".join(finding.message for finding in check_health(view(**changes)))


@pytest.mark.parametrize(
    ("caught_up_ms", "brokers", "text"),
    [
        ((60_000, 60_000, 40_000), (), "voter 3 is gone: one more loss ends the quorum"),
        ((60_000, -1, 60_000), (broker(1), broker(3)), "voter 2 is gone: one more loss ends the quorum"),
        (
            (60_000, 59_000, 59_500),
            (broker(1), broker(2), broker(3, fenced=True)),
            "voter 3 is gone: one more loss ends the quorum",
        ),
        ((60_000, 59_000, 59_000, 59_000, 1), (), "voter 5 is gone: the quorum survives the loss of 1 more"),
        ((60_000, 59_000, 59_000, 2, 1), (), "voters 4, 5 are gone: one more loss ends the quorum"),
    ],
)
def test_a_voter_that_is_gone_and_what_that_leaves(
    caught_up_ms: tuple[int, ...], brokers: tuple[BrokerDescription, ...], text: str
) -> None:
    voters = tuple(QuorumReplica(id, 5000, at) for id, at in enumerate(caught_up_ms, 1))
    seen = view(quorum=QuorumInfo(1, 4, 5000, voters, ()), brokers=brokers or tuple(map(broker, range(1, 6))))
    found = " | ".join(finding.message for finding in check_health(seen))
    assert text in found
    assert "penstock cluster voters remove" in found


def test_replicas_that_share_a_host_while_there_are_others() -> None:
    brokers = (broker(1, host="a"), broker(2, host="a"), broker(3, host="b"))
    [found] = check_health(view(partition(replicas=(1, 2), in_sync=(1, 2)), brokers=brokers))
    assert "all replicas in one rack or on one host (orders[0])" in found.message
    assert check_health(view(partition(replicas=(1, 3), in_sync=(1, 3)), brokers=brokers)) == []
    racks = tuple(each._replace(rack=f"r{each.id}") for each in brokers)
    assert check_health(view(partition(replicas=(1, 2), in_sync=(1, 2)), brokers=racks)) == []


def test_internal_topics_warn_until_they_have_their_replicas() -> None:
    offsets = partition(
        name=PartitionName("__consumer_offsets", 0), replicas=(1, 2), in_sync=(1, 2), isr_min=1
    )
    wanted = {"__consumer_offsets": 3}
    [found] = check_health(view(offsets, internal_replicas=wanted))
    assert "__consumer_offsets has fewer than 3 in-sync replicas of 1 partition" in found.message
    raised = offsets._replace(replicas=(1, 2, 3), in_sync=(1, 2, 3))
    assert check_health(view(raised, internal_replicas=wanted)) == []


def test_a_partition_on_the_move_is_judged_by_where_it_goes() -> None:
    moving = partition(
        replicas=(3, 2, 1),
        in_sync=(1, 2),
        leader=1,
        moving=PartitionReassignment((3, 2), adding=(3,), removing=(1,)),
    )
    assert not moving.is_under_replicated
    assert moving.target_replicas == (3, 2)
    assert moving.troubles == ["not led by its preferred replica", "being reassigned"]


def test_the_worst_comes_first() -> None:
    fine, slow = partition(), partition(name=PartitionName("orders", 1), in_sync=(1, 2))
    down = partition(name=PartitionName("orders", 2), leader=-1, in_sync=())
    found = view(fine, slow, down)
    document = status_document(found, check_health(found))
    assert [row["partition"] for row in document["troubles"]] == [2, 1]
    assert document["findings"][0]["level"] == ERROR
    assert document["partitions"] == {
        "total": 3, "offline": 1, "under_min_isr": 1, "under_replicated": 2, "not_preferred": 0, "reassigning": 0,
    }  # fmt: skip
    assert not document["up"]


def test_brokers_with_what_they_lead_and_hold() -> None:
    document = status_document(view(partition(replicas=(1, 9), in_sync=(1,))), [])
    rows = {
        row["node"]: (row["state"], row["leads"], row["replicas"], row["in_sync"])
        for row in document["brokers"]
    }
    assert rows == {
        1: ("active", 1, 1, 1), 2: ("active", 0, 0, 0), 3: ("active", 0, 0, 0), 9: ("unknown", 0, 1, 0),
    }  # fmt: skip
