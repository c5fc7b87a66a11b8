"""A relay without kills: what it does with rows."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.application.outbox.reading import messages
from tests.application.outbox.shop import Shop
from tests.brokers import BrokerProcess
from tests.topics import create_topics
from tests.waiting import eventually

from penstock.client.outbox import OnReject, OutboxError, Relay, add, kafka
from penstock.client.outbox.database import create_tables, open_database
from penstock.client.outbox.messages import RelayInterrupted

Unique = Callable[[str], str]


@pytest.fixture
def name(unique: Unique) -> str:
    return unique("outbox")[:100]


@pytest.fixture
def topic(unique: Unique) -> str:
    return unique("orders")


@pytest.fixture
def relay(url: str, bootstrap: str, name: str) -> Iterator[Callable[..., Relay]]:
    """Makes relays of one database; those that are left running are stopped."""
    create_tables(url)
    stopping = threading.Event()
    running: list[threading.Thread] = []

    def make(*, starts: bool = False, **more: Any) -> Relay:
        made = Relay(url, bootstrap, **{"name": name, **more})
        if starts:
            running.append(threading.Thread(target=made.run, args=(stopping,), daemon=True))
            running[-1].start()
        return made

    yield make
    stopping.set()
    for thread in running:
        thread.join(20)
        assert not thread.is_alive()


def put(url: str, *messages: tuple[str, object, str | None], **more: Any) -> None:
    """Topic, value and key of each, in one transaction."""
    with Shop(url).connected() as connection:
        for topic, value, key in messages:
            add(connection, topic, value, key=key, **more)


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return [message.value() for message in messages(bootstrap, [topic])]


def make_topic(bootstrap: str, topic: str, partitions: int = 1, **settings: str) -> None:
    config = {key.replace("_", "."): value for key, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    create_topics(admin, NewTopic(topic, partitions, config=config))


def dies_before_deleting(relay: Relay) -> Relay:
    """As a relay that is killed once the batch is committed."""
    database: Any = relay._open_database()

    def delete(ids: object) -> int:
        raise RelayInterrupted("killed")

    database.delete = delete
    relay._open_database = lambda: database  # type: ignore[method-assign]
    with pytest.raises(RelayInterrupted, match="killed"):
        relay._work(threading.Event(), once=True)
    return relay


# Messages


def test_messages_arrive_as_they_were_added(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    make_topic(bootstrap, topic, partitions=4)
    put(url, (topic, b"\x00\xff", "customer-7"), headers={"raw": b"\xff", "text": "yes", "none": None})
    put(url, (topic, None, "gone"), message_id="mine")
    put(url, (topic, "there", None), partition=2)
    assert relay().run(once=True).relayed == 3
    found = {message.key(): message for message in messages(bootstrap, [topic])}
    first = dict(found[b"customer-7"].headers())
    assert found[b"customer-7"].value() == b"\x00\xff"
    assert (first["raw"], first["text"], first["none"], len(first["message-id"])) == (
        b"\xff",
        b"yes",
        None,
        32,
    )
    assert found[b"gone"].value() is None
    assert dict(found[b"gone"].headers())["message-id"] == b"mine"
    assert found[None].partition() == 2
    assert found[b"customer-7"].partition() == 3, "as Java's murmur2 has it"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_nothing_is_left_and_nothing_comes_twice(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    put(url, *((topic, str(number), "k") for number in range(50)))
    assert (relay(batch_rows=20).run(once=True).batches, Shop(url).waiting()) == (3, 0)
    assert relay().run(once=True).relayed == 0
    assert values(bootstrap, topic) == [b"%d" % number for number in range(50)]


def test_rows_are_relayed_when_they_are_committed(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    """Long before the relay would look by itself."""
    made = relay(starts=True, poll_s=600)
    for number in range(3):
        put(url, (topic, str(number), "k"))
        eventually(lambda: made.counts.relayed == number + 1, what="relaying")  # noqa: B023
    assert values(bootstrap, topic) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_shards_have_all_rows_between_them(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    put(url, *((topic, f"{key} {number}", f"k{key}") for number in range(3) for key in range(20)))
    counts = [relay(shards=3, shard=shard).run(once=True).relayed for shard in range(3)]
    assert sum(counts) == 60
    assert min(counts) > 0
    found = values(bootstrap, topic)
    for key in range(20):
        assert [value for value in found if value and value.startswith(b"%d " % key)] == [
            b"%d %d" % (key, number) for number in range(3)
        ]


# What earlier relays have left


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_batch_that_was_committed_and_not_deleted_is_not_sent_again(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    put(url, (topic, "1", "k"), (topic, "2", "k"))
    dies_before_deleting(relay())
    put(url, (topic, "3", "k"))
    counts = relay().run(once=True)
    assert (counts.settled, counts.relayed) == (2, 1)
    assert values(bootstrap, topic) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_relays_of_another_kind_settle_what_was_left(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str, name: str
) -> None:
    put(url, (topic, "1", "k"), (topic, "2", "k"))
    dies_before_deleting(relay())
    put(url, (topic, "3", "k"))
    counts = [relay(shard=shard, shards=2, name=f"{name[:90]}-new").run(once=True) for shard in range(2)]
    assert (counts[0].settled, sum(each.relayed for each in counts)) == (2, 1)
    assert values(bootstrap, topic) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_marker_behind_another_shards_open_transaction_is_waited_for(
    relay: Callable[..., Relay],
    url: str,
    bootstrap: str,
    topic: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """read_committed readers stop at the first open transaction, even before committed records."""
    relay().run(once=True)
    other = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{name}-other"})
    other.init_transactions(20)
    other.begin_transaction()
    other.produce(f"penstock.outbox.{name}", b"", b"1/7")
    other.flush(60)
    put(url, (topic, "1", "k"))
    seen, taken = [], kafka._apply_message

    def spy(message: Any, latest: dict[bytes, bytes], position: int) -> int:
        if message.error() is not None and not seen:
            seen.append(message.offset())
            other.abort_transaction(20)
        return taken(message, latest, position)

    made = relay()
    made._read_markers = lambda *_: []  # type: ignore[method-assign]
    dies_before_deleting(made)
    monkeypatch.setattr(kafka, "_apply_message", spy)
    counts = relay().run(once=True)
    assert len(seen) == 1, "the reader was held back"
    assert (counts.settled, counts.relayed) == (1, 0)
    assert values(bootstrap, topic) == [b"1"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_an_id_that_a_restored_database_gives_again_is_another_row(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    put(url, (topic, "1", "k"))
    dies_before_deleting(relay())
    with Shop(url).connected() as connection:  # as a backup from before the row has it
        connection.execute("DELETE FROM penstock_outbox")
        connection.execute("DELETE FROM sqlite_sequence")
    put(url, (topic, "2", "k"))
    counts = relay().run(once=True)
    assert (counts.settled, counts.relayed) == (0, 1)
    assert values(bootstrap, topic) == [b"1", b"2"]


# Who may relay


def test_a_second_relay_takes_over_when_the_first_is_gone(
    relay: Callable[..., Relay], url: str, topic: str, bootstrap: str, name: str
) -> None:
    stopping = threading.Event()
    first = Relay(url, bootstrap, name=name)
    thread = threading.Thread(target=first.run, args=(stopping,))
    thread.start()
    put(url, (topic, "1", "k"))
    eventually(lambda: first.counts.relayed == 1)
    with pytest.raises(OutboxError, match="another relay runs for shard 0 of 1"):
        relay().run(once=True)
    told: list[str] = []
    second = relay(starts=True, say=told.append)
    eventually(lambda: "waiting to take over" in "".join(told))
    stopping.set()
    thread.join()
    put(url, (topic, "2", "k"))
    eventually(lambda: second.counts.relayed == 1)
    assert values(bootstrap, topic) == [b"1", b"2"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_another_database_does_not_get_the_same_name_unasked(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str, name: str, tmp_path: Any
) -> None:
    put(url, (topic, "1", "k"))
    relay().run(once=True)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    create_tables(other)
    put(other, (topic, "2", "k"))
    with pytest.raises(OutboxError, match="markers of another database"):
        Relay(other, bootstrap, name=name).run(once=True)
    assert Relay(other, bootstrap, name=name, take_over=True).run(once=True).relayed == 1
    assert values(bootstrap, topic) == [b"1", b"2"], "its first row has the id that the marker names"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_markers_that_are_forgotten_are_no_markers(
    relay: Callable[..., Relay], bootstrap: str, name: str
) -> None:
    make_topic(bootstrap, f"penstock.outbox.{name}", cleanup_policy="delete")
    with pytest.raises(OutboxError, match=r"cleanup\.policy=delete, which would delete markers"):
        relay().run(once=True)


@pytest.mark.parametrize(
    "more", [{"shards": 0}, {"shards": 2, "shard": 2}, {"batch_rows": 0}, {"name": "a b"}]
)
def test_what_cannot_be_is_refused(bootstrap: str, more: dict[str, Any]) -> None:
    with pytest.raises(OutboxError):
        Relay("sqlite:///x.db", bootstrap, **more)
    with pytest.raises(OutboxError, match="cannot be set"):
        Relay("sqlite:///x.db", bootstrap, settings={"transactional.id": "mine"})


# What the broker refuses


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_row_that_no_broker_takes_holds_up_its_key_alone(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    """And once the reason is gone, it is published in its place."""
    make_topic(bootstrap, topic, max_message_bytes="1000")
    rows = [
        (topic, "1", "a"),
        (topic, "2" * 5000, "b"),
        (topic, "3", "b"),
        (topic, "4", "a"),
        (topic, "5", None),
    ]
    put(url, *rows)
    told: list[str] = []
    assert relay(say=told.append).run(once=True).rejected == 1
    assert values(bootstrap, topic) == [b"1", b"4", b"5"]
    assert "REJECTED row 2" in "".join(told)
    database = open_database(url)
    ((row), (status,)) = database.rejected()[0], database.status(1)
    assert (row.id, row.key, status.waiting, status.held, status.rejected) == (2, b"b", 1, 1, 1)
    assert "too large" in row.reason
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result()
    make_topic(bootstrap, topic, max_message_bytes="100000")
    assert database.retry([2]) == 1
    database.close()
    relay().run(once=True)
    assert values(bootstrap, topic) == [b"2" * 5000, b"3"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_others_need_not_wait_for_a_rejected_row(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    make_topic(bootstrap, topic)
    put(url, (topic, "1", "k"), partition=7)
    put(url, (topic, "2", "k"))
    assert relay(on_reject=OnReject.SKIP).run(once=True).rejected == 1
    assert values(bootstrap, topic) == [b"2"]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_relay_that_is_told_to_stops_at_a_rejected_row(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    make_topic(bootstrap, topic)
    put(url, (topic, "1", "k"), partition=7)
    with pytest.raises(OutboxError, match=r"refused row 1 .*: .* has no partition 7"):
        relay(on_reject="stop").run(once=True)
    assert Shop(url).waiting() == 1


def test_rows_for_a_topic_that_is_not_there_are_rejected(
    sqlite_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "_UNKNOWN_TOPIC_S", 0.3)
    broker = BrokerProcess(tmp_path / "broker", {"auto.create.topics.enable": "false"}).start()
    try:
        make_topic(broker.bootstrap_servers, "there")
        create_tables(sqlite_url)
        put(sqlite_url, ("missing", "1", "a"), ("there", "2", "a"), ("missing", "3", "b"))
        counts = Relay(sqlite_url, broker.bootstrap_servers).run(once=True)
        assert (counts.relayed, counts.rejected) == (1, 2)
        assert values(broker.bootstrap_servers, "there") == [b"2"]
    finally:
        broker.kill()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_rows_that_others_have_written_wrongly_are_rejected(
    relay: Callable[..., Relay], url: str, bootstrap: str, topic: str
) -> None:
    make_topic(bootstrap, topic)
    with Shop(url).connected() as connection:
        for name, partition, headers in [
            ("no topic", "NULL", "[]"),
            ("", "NULL", "[]"),
            (topic, "-3", "[]"),
            (topic, "NULL", "7"),
            (topic, "NULL", "{"),
        ]:
            connection.execute(
                "INSERT INTO penstock_outbox (shard_hash, topic, partition, value, headers, message_id) "
                f"VALUES (1, '{name}', {partition}, 'v', '{headers}', 'm')"
            )
    put(url, (topic, "fine", "k"))
    assert relay().run(once=True).rejected == 5
    assert values(bootstrap, topic) == [b"fine"]
