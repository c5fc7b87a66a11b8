"""Damaged bytes on the disk of a real node: acknowledged records are served or refused, never deleted."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess, ClusterProcesses, executable
from tests.damage import flip_byte
from tests.topics import create_topics
from tests.waiting import eventually

COUNT = 200
METADATA = "__cluster_metadata-0"


def create(bootstrap: str, topic: str = "t", replicas: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    new = NewTopic(topic, 1, replicas, config={"segment.bytes": "5000"})
    create_topics(admin, new)


def write(bootstrap: str, first: int, count: int = COUNT, topic: str = "t") -> None:
    """Every record in a batch of its own, all of them acknowledged."""
    failed: list[KafkaError] = []
    settings = {
        "bootstrap.servers": bootstrap,
        "batch.num.messages": 1,
        "linger.ms": 0,
        "acks": "all",
        "log_level": 0,
    }
    producer = Producer(settings)
    for number in range(first, first + count):
        producer.produce(
            topic, str(number).encode(), on_delivery=lambda error, _: error and failed.append(error)
        )
        producer.poll(0)
    assert producer.flush(60) == 0
    assert not failed


def read(bootstrap: str, first: int, end: int, topic: str = "t") -> list[int]:
    """The values at these offsets, which are the offsets themselves."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "checker", "check.crcs": True, "log_level": 0}
    )
    found: list[int] = []
    try:
        consumer.assign([TopicPartition(topic, 0, first)])
        while not found or found[-1] < end - 1:
            message = consumer.poll(60)
            assert message is not None, f"stuck after {found[-1:]}"
            assert message.error() is None, message.error()
            assert message.offset() == int(message.value())
            found.append(message.offset())
    finally:
        consumer.close()
    return found


def error_at(bootstrap: str, offset: int, topic: str = "t") -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "checker", "log_level": 0})
    try:
        consumer.assign([TopicPartition(topic, 0, offset)])
        message = consumer.poll(60)
        assert message is not None
        assert message.error() is not None, message.value()
        return message.error().code()
    finally:
        consumer.close()


def segments(data_dir: Path, folder: str = "t-0") -> list[Path]:
    return sorted((data_dir / folder).glob("*.log"))


def contents(paths: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in paths}


def disk(*words: str, code: int = 0) -> str:
    done = subprocess.run([*executable(), "disk", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def topics_of(bootstrap: str) -> set[str]:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    return set(admin.list_topics(timeout=60).topics)


@pytest.fixture
def killed(fresh_broker: BrokerProcess) -> BrokerProcess:
    """A node that was killed with records in many segments."""
    create(fresh_broker.bootstrap_servers)
    write(fresh_broker.bootstrap_servers, 0)
    fresh_broker.kill_before_checkpoint()
    return fresh_broker


def middle_of(path: Path) -> int:
    return path.stat().st_size // 2


def last_batch_of(path: Path) -> int:
    return path.stat().st_size - 3


@pytest.mark.parametrize(
    ("segment", "place"),
    [
        (1, middle_of),
        pytest.param(-1, middle_of, marks=pytest.mark.slow),
        pytest.param(-1, last_batch_of, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_byte_costs_the_records_of_one_batch(
    killed: BrokerProcess, segment: int, place: Callable[[Path], int]
) -> None:
    path = segments(killed.data_dir)[segment]
    flip_byte(path, place(path))
    before = contents(segments(killed.data_dir))
    killed.start()
    bootstrap = killed.bootstrap_servers
    assert sum("log damaged" in line for line in killed.output) == 1
    (row,) = json.loads(disk("damage", "--data-dir", str(killed.data_dir), "--json"))
    bad, end = row["from_offset"], row["to_offset"] + 1
    assert (row["partition"], row["state"], end - bad) == ("t-0", "refused", 1)
    assert not bad or read(bootstrap, 0, bad) == list(range(bad))
    assert error_at(bootstrap, bad) == KafkaError.INVALID_MSG
    write(bootstrap, COUNT, 5)
    assert read(bootstrap, end, COUNT + 5) == list(range(end, COUNT + 5))
    for path, content in before.items():
        assert path.read_bytes().startswith(content), "every byte is kept"
    killed.restart()
    assert read(bootstrap, end, COUNT + 5) == list(range(end, COUNT + 5))
    assert error_at(bootstrap, bad) == KafkaError.INVALID_MSG
    killed.stop()
    disk("accept-loss", "t-0", "--data-dir", str(killed.data_dir), "--yes")
    killed.start()
    assert read(bootstrap, 0, COUNT + 5) == [n for n in range(COUNT + 5) if n != bad]


def test_damage_that_no_start_looks_for_is_refused_once_it_was_verified(fresh_broker: BrokerProcess) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    create(bootstrap)
    write(bootstrap, 0)
    fresh_broker.stop()
    path = segments(fresh_broker.data_dir)[0]
    flip_byte(path, last_batch_of(path))
    fresh_broker.restart()
    assert not any("log damaged" in line for line in fresh_broker.output), (
        "a clean start reads no old segment"
    )
    folder = ("--data-dir", str(fresh_broker.data_dir), "--json")
    (running,) = json.loads(disk("damage", "--verify", *folder))
    fresh_broker.stop()
    (row,) = json.loads(disk("damage", "--verify", *folder))
    bad = row["from_offset"]
    assert (running["state"], row["state"], row["to_offset"]) == ("not met yet", "refused", bad)
    fresh_broker.start()
    assert error_at(bootstrap, bad) == KafkaError.INVALID_MSG
    assert read(bootstrap, bad + 1, COUNT) == list(range(bad + 1, COUNT))


def test_damaged_indexes_cost_nothing(killed: BrokerProcess) -> None:
    for path in (killed.data_dir / "t-0").glob("*index"):
        if path.stat().st_size:
            flip_byte(path, path.stat().st_size // 2)
    killed.start()
    assert read(killed.bootstrap_servers, 0, COUNT) == list(range(COUNT))


def test_a_partition_folder_that_is_gone_is_not_begun_again_in_silence(killed: BrokerProcess) -> None:
    folder = killed.data_dir / "t-0"
    folder.rename(killed.data_dir.parent / "elsewhere")
    killed.start()
    bootstrap = killed.bootstrap_servers
    assert any("partition folder is missing" in line for line in killed.output)
    settings = {"bootstrap.servers": bootstrap, "message.timeout.ms": 60_000, "retries": 0, "log_level": 0}
    told: list[KafkaError] = []
    producer = Producer(settings)
    producer.produce("t", b"x", on_delivery=lambda error, _: told.append(error))
    producer.flush(20)
    assert told[0].code() == KafkaError.KAFKA_STORAGE_ERROR
    killed.stop()
    disk("accept-loss", "t-0", "--data-dir", str(killed.data_dir), "--yes")
    killed.start()
    write(bootstrap, COUNT, 5)
    assert read(bootstrap, COUNT, COUNT + 5) == list(range(COUNT, COUNT + 5)), "no offset is given out twice"


@pytest.mark.parametrize("stop", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_damaged_metadata_log_is_refused_and_keeps_every_byte(
    fresh_broker: BrokerProcess, stop: str
) -> None:
    create(fresh_broker.bootstrap_servers)
    write(fresh_broker.bootstrap_servers, 0, 10)
    create(fresh_broker.bootstrap_servers, "later")
    getattr(fresh_broker, stop)()
    (path,) = segments(fresh_broker.data_dir, METADATA)
    position = path.read_bytes().index(b"later")
    flip_byte(path, position)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(AssertionError, match="the metadata log is damaged"):
            fresh_broker.start()
        assert path.read_bytes() == before
    assert "Traceback" not in "".join(fresh_broker.output)
    assert "offset" in disk("accept-loss", METADATA, "--data-dir", str(fresh_broker.data_dir), "--yes")
    fresh_broker.start()
    assert read(fresh_broker.bootstrap_servers, 0, 10) == list(range(10)), "what was decided before is there"
    assert list(fresh_broker.data_dir.glob(f"{METADATA}.*-stray"))
    create(fresh_broker.bootstrap_servers, "later-still")


def test_a_damaged_metadata_snapshot_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    node = BrokerProcess(tmp_path, {"metadata.log.max.record.bytes.between.snapshots": "2000"}).start()
    try:
        names = [f"topic-{number}" for number in range(40)]
        admin = AdminClient({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})
        for name in names:
            create_topics(admin, NewTopic(name, 1, 1))
        node.kill()
        newest = max((tmp_path / METADATA).glob("*.checkpoint"))
        flip_byte(newest, newest.stat().st_size // 2)
        node.start()
        assert set(names) <= topics_of(node.bootstrap_servers)
    finally:
        node.kill()


# Three nodes


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(tmp_path)
    try:
        yield cluster.start()
    finally:
        cluster.kill()


def in_sync(bootstrap: str, topic: str = "t") -> set[int]:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    return set(admin.list_topics(topic, 10).topics[topic].partitions[0].isrs)


def test_one_of_three_fetches_what_is_damaged_and_never_leads_with_it(trio: ClusterProcesses) -> None:
    bootstrap = trio.bootstrap_servers
    create(bootstrap, replicas=3)
    write(bootstrap, 0)
    eventually(lambda: in_sync(bootstrap) == {1, 2, 3})
    victim = trio.nodes[2]
    victim.kill_before_checkpoint()
    (path, *_) = segments(victim.data_dir)
    flip_byte(path, path.stat().st_size // 2)
    damaged = path.read_bytes()
    victim.start()
    # It may not have left the in-sync set yet when the node is ready.
    (stray,) = eventually(lambda: list(victim.data_dir.glob("t-0.*-stray")))
    assert (stray / path.name).read_bytes() == damaged, "kept for an operator"
    others = b"".join(p.read_bytes() for p in segments(trio.nodes[1].data_dir))

    def is_fetched() -> bool:
        found = b"".join(p.read_bytes() for p in segments(victim.data_dir))
        return found == others and in_sync(bootstrap) == {1, 2, 3}

    eventually(is_fetched)
    assert read(bootstrap, 0, COUNT) == list(range(COUNT))


def test_one_of_three_fetches_its_metadata_again(trio: ClusterProcesses) -> None:
    bootstrap = trio.bootstrap_servers
    create(bootstrap, replicas=3)
    write(bootstrap, 0, 20)
    victim = trio.nodes[3]
    victim.kill()
    path = segments(victim.data_dir, METADATA)[-1]
    flip_byte(path, path.stat().st_size // 2)
    damaged = path.read_bytes()
    victim.start()
    (stray,) = victim.data_dir.glob(f"{METADATA}.*-stray")
    assert (stray / path.name).read_bytes() == damaged
    eventually(lambda: in_sync(bootstrap) == {1, 2, 3})
    assert "t" in topics_of(bootstrap)
    eventually(lambda: any("joined the voters" in line for line in list(victim.output)))
    # With one of the others gone, the quorum needs its vote.
    trio.nodes[1].kill()
    eventually(lambda: _creates(victim.bootstrap_servers))


def _creates(bootstrap: str) -> bool:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        admin.create_topics([NewTopic("after", 1, 1)], request_timeout=5)["after"].result(10)
    except Exception as error:
        return "already exists" in str(error)
    return True
