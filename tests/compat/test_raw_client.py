"""The raw client on a real broker reads and writes the same as librdkafka."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import AdminClient
from tests.brokers import BrokerProcess
from tests.compat import confluent, message
from tests.compat.raw_client import batch, read, read_committed, records, settings, values
from tests.waiting import eventually

from penstock.client.errors import ClientError, Fenced, OutOfRange, Refused, TopicChanged, Unavailable
from penstock.client.wire import offsets
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.fetch import PartitionReader
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import EARLIEST, LATEST, CommittedOffset, list_offsets
from penstock.client.wire.producer import (
    PreparedTransaction,
    RawProducer,
    TwoPhaseKind,
    end_prepared_transaction,
)
from penstock.client.wire.topics import (
    NewTopic,
    alter_topic_settings,
    create_partitions,
    create_topics,
    delete_topics,
    topic_settings,
)
from penstock.client.wire.transactions import describe_transaction, list_transactions
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode

#: Where we know less than brokers do, which all have these since years: Produce, Metadata, OffsetCommit, OffsetFetch;
#: and FindCoordinator, which finds only coordinators of groups in its first version.
OLDEST = {0: 3, 3: 4, 8: 5, 9: 2, 10: 1}
#: What brokers tell of a transaction that has no end but its producer's.
NEVER_MS = 2**31 - 1
PROTOCOLS = pytest.mark.parametrize("version", [0, 2], ids=["older protocol", "newer protocol"])


@pytest.fixture(params=["newest versions", "oldest versions"])
def cluster(
    request: pytest.FixtureRequest, bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """With a broker as it is, and as one that knows each request in its oldest version only."""
    if request.param == "oldest versions":
        negotiate = Connection._negotiate

        def old(self: Connection) -> None:
            negotiate(self)
            oldest = {api: max(first, OLDEST.get(api, 0)) for api, (first, _) in self._versions.items()}
            self._versions = {api: (version, version) for api, version in oldest.items()}

        monkeypatch.setattr(Connection, "_negotiate", old)
    with Cluster(settings(bootstrap)) as made:
        yield made


@pytest.fixture
def modern(bootstrap: str) -> Iterator[Cluster]:
    """Of one node, so that what that does not know does not exist."""
    with Cluster(settings(bootstrap, **{"topic.metadata.propagation.max.ms": "200"})) as made:
        yield made


def produce(cluster: Cluster, topic: str, *values: bytes, partition: int = 0, **options: Codec) -> None:
    with RawProducer(cluster) as producer:
        producer.init()
        for value in values:
            producer.send(topic, partition, batch(value, **options))
        producer.flush()


@pytest.mark.parametrize("codec", Codec)
def test_librdkafka_reads_what_we_write(cluster: Cluster, bootstrap: str, topic: str, codec: Codec) -> None:
    sent = [b"%d" % number * 50 for number in range(40)]
    with RawProducer(cluster) as producer:
        producer.init()
        deliveries = [
            producer.send(topic, 0, batch(*sent[at : at + 4], codec=codec)) for at in range(0, 40, 4)
        ]
        producer.flush()
    assert [each.offset for each in deliveries] == list(range(0, 40, 4))
    assert message.values(confluent.read(bootstrap, topic, 40)) == sent
    assert values(read(cluster, topic)) == sent


def test_we_read_what_librdkafka_writes(cluster: Cluster, bootstrap: str, topic: str) -> None:
    producer = confluent.producer(bootstrap)
    for number in range(500):
        producer.produce(topic, b"%d" % number, headers={"n": b"%d" % number})
    assert producer.flush(60) == 0
    found = read(cluster, topic, bytes_max=2000)
    assert values(found) == [b"%d" % number for number in range(500)]
    assert [record.offset for record in found] == list(range(500))
    assert found[7].headers == (("n", b"7"),)


def test_a_batch_that_is_larger_than_what_was_asked_for_comes_whole(cluster: Cluster, topic: str) -> None:
    produce(cluster, topic, b"x" * 50_000, b"y" * 50_000)
    reader = PartitionReader(cluster, topic, cluster.topic(topic).id, 0, bytes_max=1000)
    first = reader.fetch(0, wait_ms=1000)
    assert (values(records(first)), first.next_offset) == ([b"x" * 50_000], 1)
    assert first.high_watermark == 2
    at_end = reader.fetch(2, wait_ms=10)
    assert (len(at_end.data), at_end.next_offset) == (0, 2)


def test_reading_waits_for_what_is_to_come(modern: Cluster, bootstrap: str, topic: str) -> None:
    reader = PartitionReader(modern, topic, modern.topic(topic).id, 0)
    reader.fetch(0, wait_ms=1)
    later = threading.Timer(0.2, lambda: confluent.publish(bootstrap, topic, [message.Message(b"late")]))
    later.start()
    assert values(records(reader.fetch(0, wait_ms=20_000))) == [b"late"]
    later.join()


def test_offsets_by_time_and_at_the_ends(cluster: Cluster, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2, **{"retention.ms": "-1"})  # the timestamps are of 1970
    with RawProducer(cluster) as producer:
        producer.init()
        for number in range(10):
            producer.send(topic, 0, batch(b"v", timestamp=1_000_000 + number * 1000))
        producer.flush()
    wanted = {(topic, 0): LATEST, (topic, 1): LATEST}
    assert [each and each.offset for each in list_offsets(cluster, wanted).values()] == [10, 0]
    found = list_offsets(cluster, {(topic, 0): 1_003_500})[topic, 0]
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (4, 1_004_000)
    wanted = {(topic, 0): 2_000_000, (topic, 1): 1}
    assert list_offsets(cluster, wanted) == {(topic, 0): None, (topic, 1): None}


def test_what_was_deleted_and_what_is_not_there_yet(cluster: Cluster, admin: AdminClient, topic: str) -> None:
    produce(cluster, topic, b"a", b"b", b"c")
    for future in admin.delete_records([ConfluentPartition(topic, 0, 2)]).values():
        future.result()
    reader = PartitionReader(cluster, topic, cluster.topic(topic).id, 0)
    for asked in (1, 4):
        with pytest.raises(OutOfRange) as caught:
            reader.fetch(asked, wait_ms=10)
        error = caught.value
        assert (error.topic, error.asked, error.log_start, error.log_end) == (topic, asked, 2, 3)
    assert values(records(reader.fetch(2, wait_ms=1000))) == [b"c"]
    earliest = list_offsets(cluster, {(topic, 0): EARLIEST})[topic, 0]
    assert earliest is not None
    assert earliest.offset == 2


def test_a_recreated_topic_is_another_topic(modern: Cluster, topic: str) -> None:
    produce(modern, topic, b"old")
    old_id = modern.topic(topic).id
    delete_topics(modern, [topic])
    with pytest.raises(TopicChanged, match="was deleted"):
        PartitionReader(modern, topic, old_id, 0).fetch(0, wait_ms=10)
    create_topics(modern, [NewTopic(name=topic)])
    with pytest.raises(TopicChanged, match="created again"):
        PartitionReader(modern, topic, old_id, 0).fetch(0, wait_ms=10)
    produce(modern, topic, b"new")
    assert values(read(modern, topic)) == [b"new"]


def test_a_producer_does_not_go_on_in_a_later_topic_of_the_same_name(modern: Cluster, topic: str) -> None:
    with RawProducer(modern) as producer:
        producer.init()
        producer.send(topic, 0, batch(b"old"))
        producer.flush()
        delete_topics(modern, [topic])
        create_topics(modern, [NewTopic(name=topic)])
        producer.send(topic, 0, batch(b"late"))
        with pytest.raises(TopicChanged):
            producer.flush()
    assert read(modern, topic) == []


def test_what_does_not_exist(modern: Cluster, topic: str, unique: Callable[[str], str]) -> None:
    nowhere = unique("nowhere")
    assert modern.topics([nowhere, topic]).keys() == {topic}
    assert nowhere not in modern.topics(), "asking has not made it"
    with pytest.raises(Refused, match="unknown topic or partition"):
        list_offsets(modern, {(nowhere, 0): LATEST})
    with pytest.raises(Refused, match="unknown topic or partition"):
        PartitionReader(modern, topic, modern.topic(topic).id, 5).fetch(0, wait_ms=1)


def test_a_topic_to_write_to_is_made_by_the_broker(cluster: Cluster, unique: Callable[[str], str]) -> None:
    name = unique("made-by-asking")
    made = cluster.topic_to_write(name)
    assert made.partitions
    assert cluster.topics([name])[name].id == made.id
    assert cluster.topic_to_write(name).id == made.id
    with pytest.raises(Refused) as caught:
        cluster.topic_to_write("no topic")
    assert caught.value.code is ErrorCode.invalid_topic_exception


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Cluster]:
    """Of a broker that makes no topics by itself; clients are as patient as they are unless told otherwise."""
    process = BrokerProcess(tmp_path / "data", {"auto.create.topics.enable": "false"}).start()
    with Cluster(settings(process.bootstrap_servers)) as cluster:
        yield cluster
    process.stop()


def test_writing_to_an_unknown_topic_without_auto_creation(
    strict: Cluster, unique: Callable[[str], str]
) -> None:
    """It is refused after the time in which brokers hear of a topic, not after that in which they come back."""
    name = unique("unmade")
    assert strict.settings.unknown_topic_ms_max <= 5_000 < strict.settings.retry_deadline_ms
    with pytest.raises(Refused, match="unknown topic or partition"):
        strict.topic_to_write(name)
    assert strict.topics([name]) == {}


def test_topics_by_name_by_pattern_and_all(
    cluster: Cluster, new_topic: Callable[..., str], group: str
) -> None:
    name = new_topic(partitions=3)
    offsets.commit_offsets(cluster, group, {(name, 0): 1})  # which makes an internal topic
    assert len(cluster.topics([name])[name].partitions) == 3
    assert cluster.topics(re.compile(name[:-1] + ".")).keys() == {name}
    assert cluster.topics(re.compile(name[:-1])) == {}, "the whole name has to match"
    assert not any(each.startswith("__") for each in cluster.topics(re.compile(".*")))
    assert "__consumer_offsets" in cluster.topics()
    assert cluster.topics([]) == {}


def test_topics_are_made_grown_set_and_deleted(cluster: Cluster, unique: Callable[[str], str]) -> None:
    name = unique("made")
    (made,) = create_topics(
        cluster, [NewTopic(name=name, partitions=2, replicas=1, settings={"retention.ms": "5000"})]
    ).values()
    assert len(made.partitions) == 2
    with pytest.raises(Refused) as caught:
        create_topics(cluster, [NewTopic(name=name, partitions=2, replicas=1)])
    assert caught.value.code is ErrorCode.topic_already_exists
    assert topic_settings(cluster, name)["retention.ms"] == "5000"
    assert len(create_partitions(cluster, name, 4).partitions) == 4
    with pytest.raises(Refused) as caught:
        create_partitions(cluster, name, 3)
    assert caught.value.code is ErrorCode.invalid_partitions
    alter_topic_settings(cluster, name, {"retention.ms": None, "max.message.bytes": "1234"})
    found = topic_settings(cluster, name)
    assert (found["retention.ms"], found["max.message.bytes"]) == ("604800000", "1234")
    delete_topics(cluster, [name])
    assert cluster.topics([name]) == {}


def test_positions_of_a_group(cluster: Cluster, topic: str, group: str, bootstrap: str) -> None:
    assert offsets.committed_offsets(cluster, group, [(topic, 0)]) == {}
    assert offsets.group_info(cluster, group) is None
    offsets.commit_offsets(cluster, group, {(topic, 0): 5}, metadata="m")
    expected = {(topic, 0): CommittedOffset(offset=5, metadata="m")}
    assert offsets.committed_offsets(cluster, group, [(topic, 0)]) == expected
    assert offsets.committed_offsets(cluster, group) == expected
    told = offsets.group_info(cluster, group)
    assert told is not None
    assert told.group == group
    consumer = confluent.consumer(bootstrap, group_id=group)
    try:
        consumer.subscribe([topic])
        eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), what="a member")
        with pytest.raises(Refused, match="the group has active members"):
            offsets.commit_offsets(cluster, group, {(topic, 0): 6})
    finally:
        consumer.close()


@PROTOCOLS
def test_transactions(
    modern: Cluster, bootstrap: str, new_topic: Callable[..., str], group: str, version: int
) -> None:
    topic = new_topic(partitions=2)
    with RawProducer(modern, transactional_id=topic, transaction_version_max=version) as producer:
        producer.init()
        assert producer.transaction_version == version
        for turn in range(6):
            for partition in (0, 1):
                producer.send(topic, partition, batch(b"%d" % turn, b"%d!" % turn))
            producer.commit_offsets(group, {(topic, 0): turn + 1})
            producer.flush()  # an abort drops what still waits in the producer, or for a retry
            producer.end(turn % 2 == 0)
            producer.end(False)  # nothing is open
    kept = [b"0", b"0!", b"2", b"2!", b"4", b"4!"]
    assert [read_committed(modern, topic, index) for index in (0, 1)] == [kept, kept]
    found = confluent.read(bootstrap, topic, 12, partitions=2, isolation_level="read_committed")
    assert sorted(each or b"" for each in message.values(found)) == sorted(kept * 2)
    assert len(read(modern, topic)) == 12
    assert offsets.committed_offsets(modern, group, [(topic, 0)]) == {(topic, 0): CommittedOffset(offset=5)}
    assert list_transactions(modern, topic) == {topic: "CompleteAbort"}


@PROTOCOLS
def test_an_open_transaction_holds_the_end_back(modern: Cluster, topic: str, version: int) -> None:
    produce(modern, topic, b"plain")
    with RawProducer(modern, transactional_id=topic, transaction_version_max=version) as producer:
        producer.init()
        producer.send(topic, 0, batch(b"open"))
        producer.flush()
        found = list_offsets(modern, {(topic, 0): LATEST}, isolation=IsolationLevel.READ_COMMITTED)[topic, 0]
        assert found is not None
        assert found.offset == 1
        assert values(read(modern, topic, isolation=IsolationLevel.READ_COMMITTED)) == [b"plain"]
        assert describe_transaction(modern, topic) is not None
        producer.end(True)
    assert read_committed(modern, topic) == [b"plain", b"open"]


@PROTOCOLS
def test_after_a_batch_was_refused_the_transaction_is_aborted_and_the_next_one_works(
    modern: Cluster, new_topic: Callable[..., str], version: int
) -> None:
    topic = new_topic(**{"max.message.bytes": "2000"})
    with RawProducer(modern, transactional_id=topic, transaction_version_max=version) as producer:
        producer.init()
        producer.send(topic, 0, batch(b"before"))
        producer.send(topic, 0, batch(b"x" * 3000))
        for attempt in (
            producer.flush,
            lambda: producer.send(topic, 0, batch(b"z")),
            lambda: producer.end(True),
        ):
            with pytest.raises(Refused) as caught:
                attempt()
            assert caught.value.code is ErrorCode.message_too_large
        producer.end(False)
        for value in (b"one", b"two"):
            producer.send(topic, 0, batch(value))
        producer.end(True)
    assert read_committed(modern, topic) == [b"one", b"two"]


@PROTOCOLS
def test_a_successor_fences(modern: Cluster, topic: str, version: int) -> None:
    with (
        RawProducer(modern, transactional_id=topic, transaction_version_max=version) as old,
        RawProducer(modern, transactional_id=topic, transaction_version_max=version) as new,
    ):
        old.init()
        old.send(topic, 0, batch(b"old"))
        old.flush()
        new.init()
        new.send(topic, 0, batch(b"new"))
        new.end(True)
        with pytest.raises(Fenced):
            old.end(True)
        assert zombie_is_fenced(old, topic)
    assert read_committed(modern, topic) == [b"new"]


def zombie_is_fenced(producer: RawProducer, topic: str) -> bool:
    try:
        producer.send(topic, 0, batch(b"zombie"))
        producer.flush()
    except Fenced:
        return True
    return False


def test_a_broker_of_long_ago_gets_the_protocol_of_long_ago(cluster: Cluster, topic: str, group: str) -> None:
    with RawProducer(cluster, transactional_id=topic) as producer:
        producer.init()
        assert producer.transaction_version in (0, 2)
        for number in range(10):
            producer.send(topic, 0, batch(b"%d" % number))
        producer.commit_offsets(group, {(topic, 0): 10})
        producer.end(True)
    assert read_committed(cluster, topic) == [b"%d" % number for number in range(10)]
    assert offsets.committed_offsets(cluster, group, [(topic, 0)]) == {(topic, 0): CommittedOffset(offset=10)}


def test_prepared_transactions_do_not_time_out(
    modern: Cluster, tuned_broker: BrokerProcess, topic: str
) -> None:
    with RawProducer(modern, transactional_id=topic, two_phase=True) as producer:
        producer.init()
        assert producer.two_phase_kind is TwoPhaseKind.UNTIL_ENDED
        producer.send(topic, 0, batch(b"prepared"))
        prepared = producer.prepare()
    found = describe_transaction(modern, topic)
    assert found is not None
    assert found.timeout_ms == NEVER_MS
    end_prepared_transaction(modern, prepared, commit=True)
    assert read_committed(modern, topic) == [b"prepared"]


@pytest.fixture
def one_phase(tmp_path: Path) -> Iterator[Cluster]:
    """A broker as Apache Kafka's are unless told otherwise."""
    process = BrokerProcess(tmp_path / "data", {"transaction.two.phase.commit.enable": "false"}).start()
    with Cluster(settings(process.bootstrap_servers)) as cluster:
        yield cluster
    process.stop()


@PROTOCOLS
def test_two_phases_where_the_broker_has_only_one(one_phase: Cluster, version: int) -> None:
    """The next best is the longest time that it allows."""
    modern, topic = one_phase, "t"
    create_topics(modern, [NewTopic(name=topic)])
    with RawProducer(
        modern, transactional_id=topic, two_phase=True, transaction_version_max=version
    ) as producer:
        producer.init()
        assert producer.two_phase_kind is TwoPhaseKind.UNTIL_TIMEOUT
        assert producer.transaction_timeout_ms == 900_000
        empty = producer.prepare()
        assert empty.is_empty
        end_prepared_transaction(modern, empty, commit=True)
        producer.end(True)
        producer.send(topic, 0, batch(b"prepared"))
        prepared = producer.prepare()
        with pytest.raises(ClientError, match="is prepared"):
            producer.send(topic, 0, batch(b"more"))
    end_prepared_transaction(modern, prepared, commit=True)
    assert read_committed(modern, topic) == [b"prepared"]


def prepared_within(timeout_ms: int, cluster: Cluster, topic: str, version: int) -> PreparedTransaction:
    """A transaction that is soon too old; on a busy machine it may already be so before it is prepared."""
    with RawProducer(
        cluster, transactional_id=topic, transaction_timeout_ms=timeout_ms, transaction_version_max=version
    ) as producer:
        try:
            producer.init()
            producer.send(topic, 0, batch(b"slow"))
            return producer.prepare()
        except Fenced:
            pass
    return prepared_within(10 * timeout_ms, cluster, topic, version)


@PROTOCOLS
def test_a_prepared_transaction_that_took_too_long(
    modern: Cluster, tuned_broker: BrokerProcess, topic: str, version: int
) -> None:
    prepared = prepared_within(300, modern, topic, version)
    eventually(lambda: list_transactions(modern, topic) == {topic: "CompleteAbort"}, what="its end")
    with pytest.raises(Refused) as caught:
        end_prepared_transaction(modern, prepared, commit=True)
    assert caught.value.code in (
        ErrorCode.invalid_txn_state,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_epoch,
    )
    for _ in range(2):
        end_prepared_transaction(modern, prepared, commit=False)
    assert read_committed(modern, topic) == []


def test_a_prepared_transaction_of_an_id_that_went_on_with_others(modern: Cluster, topic: str) -> None:
    """Its outcome is unknown, so neither commit nor abort succeeds."""
    with RawProducer(modern, transactional_id=topic) as producer:
        producer.init()
        producer.send(topic, 0, batch(b"first"))
        prepared = producer.prepare()
        producer.end(True)
        producer.send(topic, 0, batch(b"second"))
        producer.flush()
        for commits in (True, False):
            with pytest.raises(Fenced):
                end_prepared_transaction(modern, prepared, commit=commits)
        producer.end(True)
    assert read_committed(modern, topic) == [b"first", b"second"]
    assert prepared == PreparedTransaction(
        transactional_id=topic,
        producer_id=prepared.producer_id,
        epoch=prepared.epoch,
        partitions=((topic, 0),),
    )


def test_reader_and_producer_outlive_a_restart(
    fresh_broker: BrokerProcess, unique: Callable[[str], str]
) -> None:
    name = unique("t")
    with Cluster(settings(fresh_broker.bootstrap_servers)) as cluster:
        (topic,) = create_topics(cluster, [NewTopic(name=name)]).values()
        reader = PartitionReader(cluster, name, topic.id, 0)
        with RawProducer(cluster) as producer:
            producer.init()
            for turn in range(4):
                producer.send(name, 0, batch(b"%d" % turn))
                if turn % 2:
                    fresh_broker.kill()
                    fresh_broker.start()
                producer.send(name, 0, batch(b"%d!" % turn))
                producer.flush()
                found = reader.fetch(turn * 2, wait_ms=5000)
                assert values(records(found)) == [b"%d" % turn, b"%d!" % turn]
        fresh_broker.kill()
        object.__setattr__(cluster.settings, "retry_deadline_ms", 300)
        begun = time.monotonic()
        with pytest.raises(Unavailable, match=r"was not available within .*Connection refused"):
            reader.fetch(0, wait_ms=10)
        assert time.monotonic() - begun < 20
        fresh_broker.start()


def test_a_child_makes_connections_of_its_own(modern: Cluster, topic: str) -> None:
    produce(modern, topic, b"before")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if values(read(modern, topic)) == [b"before"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert values(read(modern, topic)) == [b"before"]


def test_no_broker_anywhere() -> None:
    patient = settings("127.0.0.1:1", **{"default.api.timeout.ms": "200"})
    with Cluster(patient) as cluster, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: Connection refused"):
        cluster.topics()
