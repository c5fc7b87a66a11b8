"""Which brokers may register, and which registrations replace others."""

from uuid import UUID

import pytest
from tests.unit.cluster.clusters import CONTROLLER, broker, cluster, create, fence, register, unfence

from penstock.cluster.controller.brokers import BrokerRegistration, register_broker
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.decision import ControllerConfig
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import BrokerFeature, FeatureLevelRecord
from penstock.protocol.errors import ApiError, ErrorCode

SILENCE_MS = 2 * CONTROLLER.heartbeat_interval_ms


def refusal(
    image: ClusterImage, registration: BrokerRegistration, *, silent_ms: int | None = 0
) -> tuple[ErrorCode, str | None]:
    with pytest.raises(ApiError) as refused:
        register_broker(image, registration, broker_epoch=9, silent_ms=silent_ms, rules=CONTROLLER)
    return refused.value.code, refused.value.message


def test_a_second_broker_with_a_living_id_is_refused() -> None:
    image, second = cluster(), broker(1, incarnation=1)
    assert refusal(image, second, silent_ms=SILENCE_MS - 1)[0] is ErrorCode.duplicate_broker_registration
    fence(image, 1)
    assert register(image, second, epoch=9).reply == 9


@pytest.mark.parametrize("silent_ms", [SILENCE_MS, None])
def test_a_restarted_broker_need_not_wait_until_its_predecessor_is_fenced(silent_ms: int | None) -> None:
    image = cluster()
    assert register(image, broker(1, incarnation=1), epoch=9, silent_ms=silent_ms).reply == 9
    assert image.brokers[1].fenced


def test_with_another_disk_silence_proves_nothing() -> None:
    second = broker(1, incarnation=1, disk=5)
    code, _ = refusal(cluster(), second, silent_ms=SILENCE_MS * 10)
    assert code is ErrorCode.duplicate_broker_registration


def test_a_longer_heartbeat_asks_for_a_longer_silence() -> None:
    rules = ControllerConfig(heartbeat_interval_ms=10_000)
    with pytest.raises(ApiError):
        register(cluster(), broker(1, incarnation=1), epoch=9, silent_ms=19_999, rules=rules)


def test_a_repeated_registration_gets_the_same_answer() -> None:
    image = cluster()
    decision = register(image, broker(1), epoch=9)
    assert (decision.records, decision.reply) == ((), 1)
    assert image.brokers[1].is_active


def test_replacing_a_living_incarnation_takes_its_leads_away() -> None:
    image = cluster(2)
    create(
        image, NewTopic(name="t", assignments=((0, (1, 2)),)), NewTopic(name="s", assignments=((0, (1,)),))
    )
    register(image, broker(1, incarnation=1), epoch=9, silent_ms=None)
    led, alone = image.topics["t"].partitions[0], image.topics["s"].partitions[0]
    assert (led.leader, led.isr, led.leader_epoch) == (2, (2,), 1)
    assert (alone.leader, alone.isr, alone.elr) == (-1, (), (1,))
    unfence(image, 1)
    assert image.topics["s"].partitions[0].leader_epoch == 2


def test_a_folder_belongs_to_one_broker() -> None:
    image = cluster(2)
    copied = broker(3)._replace(log_dirs=image.brokers[2].log_dirs)
    code, message = refusal(image, copied)
    assert code is ErrorCode.invalid_registration
    assert message is not None
    assert "Broker 2 is already registered with directory" in message


@pytest.mark.parametrize("directories", [(UUID(int=2),), (UUID(int=500), UUID(int=500))])
def test_a_directory_id_is_real_and_named_once(directories: tuple[UUID, ...]) -> None:
    assert refusal(cluster(), broker(3)._replace(log_dirs=directories))[0] is ErrorCode.invalid_registration


def test_a_broker_that_lacks_a_feature_of_the_cluster_is_refused() -> None:
    image = cluster()
    image.apply([FeatureLevelRecord(name="group.version", feature_level=1)])
    assert refusal(image, broker(2))[0] is ErrorCode.unsupported_version
    able = BrokerFeature(name="group.version", min_supported_version=0, max_supported_version=1)
    assert register(image, broker(2)._replace(features=(able,)), epoch=9).reply == 9
