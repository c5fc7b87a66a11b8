"""One partition through fencing, returns, unclean stops and lost disks: its in-sync set, eligible replicas, leader."""

from typing import NamedTuple

import pytest
from tests.unit.cluster.clusters import (
    CONTROLLER,
    applied,
    broker,
    cluster,
    create,
    fence,
    register,
    unfence,
)

from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    NodeConfig,
    incremental_alter_configs,
)
from penstock.cluster.controller.brokers import restart_sole_broker
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.decision import UncleanElection
from penstock.cluster.controller.elect_leaders import elect_leaderless_partitions
from penstock.cluster.controller.election import Elected, Election, ElectionInput, elect
from penstock.cluster.controller.heartbeats import begin_shutdown
from penstock.cluster.image import ClusterImage, ConfigResource, PartitionState, ResourceType
from penstock.cluster.topic_settings import effective_isr_min
from penstock.protocol.steps import finish


class Seen(NamedTuple):
    leader: int
    isr: tuple[int, ...]
    elr: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


def topic(
    replicas: tuple[int, ...] = (1, 2, 3), *, isr_min: int = 2, flush: str = "ack", unclean: bool = False
) -> ClusterImage:
    image = cluster(4)
    configs = (
        ("min.insync.replicas", str(isr_min)),
        ("penstock.flush", flush),
        ("unclean.leader.election.enable", str(unclean).lower()),
    )
    create(image, NewTopic(name="t", assignments=((0, replicas),), configs=configs))
    return image


def partition(image: ClusterImage) -> PartitionState:
    return image.topics["t"].partitions[0]


def seen(image: ClusterImage) -> Seen:
    state = partition(image)
    return Seen(state.leader, state.isr, state.elr, state.last_known_elr)


# --- eligible leader replicas ---


def test_with_enough_in_sync_replicas_no_other_is_eligible() -> None:
    image = topic()
    fence(image, 1)
    assert seen(image) == Seen(2, (2, 3))


def test_who_leaves_below_the_minimum_stays_eligible() -> None:
    image = topic()
    fence(image, 1)
    fence(image, 2)
    assert seen(image) == Seen(3, (3,), elr=(2,))
    fence(image, 3)
    assert seen(image) == Seen(-1, (), elr=(2, 3), last=(3,))


def test_those_that_die_together_all_stay_eligible() -> None:
    image = topic()
    fence(image, 1, 2, 3)
    assert seen(image) == Seen(-1, (), elr=(1, 2, 3), last=(1,))
    unfence(image, 3)
    assert seen(image) == Seen(3, (3,), elr=(1, 2))


def test_an_eligible_replica_leads_cleanly_and_the_others_do_not() -> None:
    image = topic()
    for broker_id in (1, 2, 3):
        fence(image, broker_id)
    assert unfence(image, 1).unclean == ()
    assert seen(image) == Seen(-1, (), elr=(2, 3), last=(3,)), "broker 1 was out of sync before the others"
    assert unfence(image, 2).unclean == ()
    assert seen(image) == Seen(2, (2,), elr=(3,))


def test_the_minimum_is_no_more_than_the_replicas() -> None:
    image = topic((1,), isr_min=3)
    assert effective_isr_min(3, partition(image)) == 1
    fence(image, 1)
    unfence(image, 1)
    assert seen(image) == Seen(1, (1,))


@pytest.mark.parametrize("isr_min", ["1", "3"])
def test_another_minimum_forgets_who_was_eligible(isr_min: str) -> None:
    image = topic()
    fence(image, 1, 2)
    assert seen(image) == Seen(3, (3,), elr=(1, 2))
    change = AlterConfigsResource(
        resource=ConfigResource(ResourceType.TOPIC, "t"),
        changes=(ConfigChange("min.insync.replicas", ConfigOp.SET, isr_min),),
    )
    applied(image, finish(incremental_alter_configs(image, [change], rules=NodeConfig(node_settings={}))))
    assert seen(image) == Seen(3, (3,))
    fence(image, 3)
    unfence(image, 1)
    assert partition(image).leader == -1, "3 may have gone on without 1"


def test_without_a_leader_another_minimum_changes_nothing() -> None:
    image = topic()
    fence(image, 1, 2, 3)
    change = AlterConfigsResource(
        resource=ConfigResource(ResourceType.TOPIC, "t"),
        changes=(ConfigChange("min.insync.replicas", ConfigOp.SET, "1"),),
    )
    applied(image, finish(incremental_alter_configs(image, [change], rules=NodeConfig(node_settings={}))))
    assert partition(image).elr == (1, 2, 3)


def test_a_broker_that_shuts_down_hands_over_and_stays_eligible() -> None:
    image = topic(isr_min=3)
    applied(image, begin_shutdown(image, 1, rules=CONTROLLER))
    assert seen(image) == Seen(2, (2, 3), elr=(1,))
    assert not image.brokers[1].fenced


# --- unclean stops ---


@pytest.mark.parametrize("flush", ["ack", "interval", "never"])
def test_a_clean_restart_keeps_its_place(flush: str) -> None:
    image = topic(flush=flush)
    fence(image, 1, 2, 3)
    register(image, broker(1, incarnation=1), epoch=9)
    assert partition(image).elr == (1, 2, 3)


def test_under_ack_an_unclean_stop_keeps_its_place_too() -> None:
    image = topic(flush="ack")
    fence(image, 1, 2, 3)
    register(image, broker(1, incarnation=1, was_clean=False), epoch=9)
    unfence(image, 1)
    assert seen(image) == Seen(1, (1,), elr=(2, 3))


@pytest.mark.parametrize("flush", ["interval", "never"])
def test_without_ack_an_unclean_stop_loses_its_place(flush: str) -> None:
    image = topic(flush=flush)
    fence(image, 1, 2, 3)
    register(image, broker(1, incarnation=1, was_clean=False), epoch=9)
    unfence(image, 1)
    assert seen(image) == Seen(-1, (), elr=(2, 3), last=(1,))


def test_when_all_stopped_uncleanly_the_last_leader_comes_back_and_it_is_reported() -> None:
    image = topic(flush="interval")
    fence(image, 3)
    fence(image, 1, 2)
    for broker_id in (1, 2, 3):
        register(image, broker(broker_id, incarnation=1, was_clean=False), epoch=10 + broker_id)
    assert seen(image) == Seen(-1, (), last=(1,))
    assert unfence(image, 2).unclean == ()
    assert partition(image).leader == -1
    epoch = partition(image).leader_epoch
    assert unfence(image, 1).unclean == (UncleanElection("t", 0, -1, 1, epoch + 1),)
    assert seen(image) == Seen(1, (1,), elr=())
    assert partition(image).leader_recovering


def test_a_whole_cluster_that_lost_power_comes_back_by_itself() -> None:
    """Without fencing: the brokers die at once and register one after the other with a new controller."""
    image = topic(flush="never")
    for broker_id in (1, 2, 3):
        register(
            image, broker(broker_id, incarnation=1, was_clean=False), epoch=10 + broker_id, silent_ms=None
        )
    assert seen(image) == Seen(-1, (), last=(3,))
    reported = [each for b in (1, 2, 3) for each in unfence(image, b).unclean]
    assert [each.leader for each in reported] == [3]


def test_under_ack_such_a_cluster_loses_nothing() -> None:
    image = topic(flush="ack")
    for broker_id in (1, 2, 3):
        register(
            image, broker(broker_id, incarnation=1, was_clean=False), epoch=10 + broker_id, silent_ms=None
        )
    assert seen(image) == Seen(-1, (), elr=(2, 3), last=(3,))
    assert unfence(image, 1).unclean == ()
    assert partition(image).leader == -1
    assert unfence(image, 2).unclean == ()
    assert partition(image).leader == 2


# --- lost disks ---


@pytest.mark.parametrize("flush", ["ack", "never"])
def test_an_empty_disk_never_leads_although_it_led_last(flush: str) -> None:
    image = topic(flush=flush)
    for broker_id in (1, 2, 3):
        fence(image, broker_id)
    fence(image, 4)
    register(image, broker(3, incarnation=1, disk=5), epoch=9)
    unfence(image, 3)
    assert seen(image) == Seen(-1, (), elr=(2,))
    unfence(image, 2)
    assert seen(image) == Seen(2, (2,))


def test_a_new_disk_is_known_from_its_registration_on() -> None:
    image = topic()
    old = partition(image).directories
    register(image, broker(2, incarnation=1, disk=5), epoch=9, silent_ms=None)
    new = partition(image).directories
    assert (new[0], new[2]) == (old[0], old[2])
    assert new[1] == image.brokers[2].log_dirs[0] != old[1]
    assert seen(image) == Seen(1, (1, 3))


def test_a_sole_replica_is_the_best_copy_there_is() -> None:
    image = topic((1,), flush="never")
    register(image, broker(1, incarnation=1, was_clean=False), epoch=9, silent_ms=None)
    assert unfence(image, 1).unclean == ()
    assert seen(image) == Seen(1, (1,))
    register(image, broker(1, incarnation=2, disk=5), epoch=11, silent_ms=None)
    (loss,) = unfence(image, 1).unclean
    assert (loss.topic, loss.leader) == ("t", 1)
    assert seen(image) == Seen(1, (1,))


def test_a_sole_broker_reports_a_lost_disk_too() -> None:
    image = cluster(1)
    create(image, NewTopic(name="t", assignments=((0, (1,)),)))
    decision = applied(
        image, restart_sole_broker(image, broker(1, incarnation=1, disk=5), broker_epoch=7, rules=CONTROLLER)
    )
    assert [each.leader for each in decision.unclean] == [1]
    assert partition(image).leader_epoch == 1


# --- unclean elections ---


def test_unclean_election_happens_only_where_it_is_allowed() -> None:
    for unclean in (False, True):
        image = topic(isr_min=1, unclean=unclean)
        fence(image, 1, 2)
        epoch = partition(image).leader_epoch
        register(image, broker(1, incarnation=1), epoch=9)
        unfence(image, 1)
        assert partition(image).leader == 3, "somebody is in sync"
        decision = fence(image, 3)
        if unclean:
            assert decision.unclean == (UncleanElection("t", 0, 3, 1, epoch + 1),)
            assert seen(image) == Seen(1, (1,))
            assert partition(image).leader_recovering
        else:
            assert decision.unclean == ()
            assert seen(image) == Seen(-1, (), elr=(3,), last=(3,))


def test_a_partition_without_a_leader_gets_one_once_settings_allow_it() -> None:
    image = topic(isr_min=1)
    fence(image, 1)
    fence(image, 2, 3)
    unfence(image, 1)
    elections = elect_leaderless_partitions(image, rules=CONTROLLER, partitions_max=10)
    assert (elections.records, elections.reply) == ((), 0)
    change = AlterConfigsResource(
        resource=ConfigResource(ResourceType.TOPIC, "t"),
        changes=(ConfigChange("unclean.leader.election.enable", ConfigOp.SET, "true"),),
    )
    applied(image, finish(incremental_alter_configs(image, [change], rules=NodeConfig(node_settings={}))))
    decision = applied(image, elect_leaderless_partitions(image, rules=CONTROLLER, partitions_max=10))
    assert decision.reply == 1
    assert [each.leader for each in decision.unclean] == [1]


ONLINE, PREFERRED, UNCLEAN = Election.ONLINE, Election.PREFERRED, Election.UNCLEAN


@pytest.mark.parametrize(
    ("alive", "leader", "isr", "elr", "last", "election", "expected"),
    [
        ({1, 2, 3}, 2, (1, 2, 3), (), (), ONLINE, Elected(2)),
        ({1, 2, 3}, 2, (1, 2, 3), (), (), PREFERRED, Elected(1)),
        ({2, 3}, 2, (2, 3), (), (), PREFERRED, Elected(2)),
        ({2, 3}, 1, (2, 3), (), (), ONLINE, Elected(2)),
        ({3}, 1, (2, 3), (), (), ONLINE, Elected(3)),
        ({1, 3}, -1, (), (2, 3), (), ONLINE, Elected(3)),
        ({1, 3}, 1, (3,), (1,), (), ONLINE, Elected(3)),  # in sync comes before eligible
        ({1}, -1, (), (2, 3), (), ONLINE, Elected(-1)),
        ({1}, -1, (), (2, 3), (), UNCLEAN, Elected(1, unclean=True)),
        ({1, 2}, -1, (), (2, 3), (), UNCLEAN, Elected(2)),  # never unclean without need
        ({1, 2}, -1, (), (), (2,), ONLINE, Elected(2, unclean=True)),
        ({1, 3}, -1, (), (), (2,), ONLINE, Elected(-1)),
        ({1, 2}, -1, (), (3,), (2,), ONLINE, Elected(-1)),
        ({1, 2}, -1, (), (), (1, 2), ONLINE, Elected(-1)),
        (set(), -1, (), (), (), UNCLEAN, Elected(-1)),
    ],
)
def test_who_is_elected(
    alive: set[int],
    leader: int,
    isr: tuple[int, ...],
    elr: tuple[int, ...],
    last: tuple[int, ...],
    election: Election,
    expected: Elected,
) -> None:
    candidates = ElectionInput((1, 2, 3), leader, isr, elr, last, alive.__contains__, trusts_last_leader=True)
    assert elect(candidates, election) == expected
    if last and expected.unclean:
        assert elect(candidates._replace(trusts_last_leader=False), ONLINE) == Elected(-1)
