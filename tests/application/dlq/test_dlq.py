"""`penstock dlq` on a real broker: list, edit, replay once, and purge dead letters."""

import itertools
import json
import os
import pty
import signal
import subprocess
import time

import pytest
from tests.application.dlq.dead_letters import MOMENT_MS, OWN, letter
from tests.brokers import executable
from tests.compat import share
from tests.compat.message import Message
from tests.waiting import eventually

from penstock.client import Penstock
from penstock.client.deadletters.headers import RETRY_SETTINGS, is_for_group, read_origin, replayed_topic
from penstock.client.deadletters.replay import Replay, ReplayRequest, plan_replay
from penstock.client.deadletters.writer import ReplayFenced, locked_producer, replay_query_name
from penstock.client.wire.offsets import commit_offsets
from penstock.client.wire.producer import RawProducer
from penstock.protocol.dead_letter_headers import WITHOUT_RECORD_HEADER
from penstock.protocol.record_batch import Record, encode_batch
from penstock.spark.exactly_once.decisions import sink_transactional_id
from penstock.spark.replay.lock import SparkReplayLock, acquire_lock


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


# Looking


def test_all_topics_with_what_they_hold(penstock, answer, office, orders, dead, unique):
    penstock("dlq", "replay", dead, "--error", "TimeoutError", "--limit", "4")
    [found] = [each for each in answer("dlq", "list") if each["topic"] == dead]
    assert found["letters"] == 20
    assert (found["waiting"], found["replayed"], found["purged"]) == (16, 4, 0)
    assert found["groups"] == {"billing": 16}
    assert found["errors"] == {"shop.errors.NoSuchColour": 10, "TimeoutError": 6}
    assert abs(found["newest"] - time.time() * 1000) < 60_000
    [row] = [line for line in penstock("dlq", "list")[0].splitlines() if line.startswith(dead)]
    assert row.split()[1:5] == ["16", "4", "0", "0"]
    assert "NoSuchColour (10), TimeoutError (6)" in row
    nothing = unique("nobody")
    assert "no dead letters match" in penstock("dlq", "list", "--group", nothing)[1]


def test_letters_by_topic_by_where_they_are_from_and_by_group(penstock, office, orders, dead, unique):
    group = unique("shipping")
    office.fill(dead, [letter(orders, 50, group=group, handler="ship", dead_in=1)])
    everything = lines(penstock("dlq", "list", dead, "--json")[0])
    assert len(everything) == 21
    assert lines(penstock("dlq", "list", orders, "--json")[0]) == everything
    [found] = lines(penstock("dlq", "list", group, "--json")[0])
    assert found == {
        "topic": dead,
        "partition": 1,
        "offset": 10,
        "timestamp": found["timestamp"],
        "state": "waiting",
        "done_at": None,
        "done_by": None,
        "done_to": None,
        "origin": {"topic": orders, "partition": 0, "offset": 50, "timestamp": MOMENT_MS + 50},
        "group": group,
        "handler": "ship",
        "error": "shop.errors.NoSuchColour",
        "message": "no 50\nat all",
        "reason": "failed",
        "attempts": 5,
        "edited_from": None,
        "has_record": True,
        "key": "k50",
    }
    table, told = penstock("dlq", "list", group)
    assert table.splitlines()[1].split()[-6:] == [
        "ship",
        "shop.errors.NoSuchColour",
        "no",
        "50",
        "5",
        "waiting",
    ]
    table, told = penstock("dlq", "list", dead, "--limit", "2")
    assert len(table.splitlines()) == 3
    assert told == "19 dead letters more; --limit 21 shows all\n"


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--error", "Timeout*"], range(10, 20)),
        (["--error", "NoSuchColour", "--key", "k3", "--key", "k4", "--key", "k14"], [3, 4]),
        (["--partition", "1", "--offset", "2-4"], [5, 7, 9]),
        (["--header", "trace=abc", "--key", "k5"], [5]),
        (["--header", "trace=other"], []),
        (["--group", "other"], []),
        (["--since", "1h"], range(20)),
        (["--until", "1h ago"], []),
    ],
)
def test_filters(penstock, dead, flags, numbers):
    found = lines(penstock("dlq", "list", dead, *flags, "--json")[0])
    assert sorted(int(each["key"][1:]) for each in found) == list(numbers)


def test_one_letter_in_full(penstock, answer, office, orders, dead):
    office.fill(dead, [letter(orders, 1, value=b'{"colour":"red"}')])
    shown, _ = penstock("dlq", "show", dead, "0:10")
    assert f"from         {orders} 0:1\n" in shown
    assert '{\n  "colour": "red"\n}\n' in shown
    assert "shop.errors.NoSuchColour" in shown
    assert shown.endswith("Traceback ...\nboom\n")
    found = answer("dlq", "show", orders, "0:10")
    assert found["value"] == '{"colour":"red"}'
    assert found["headers"] == [["trace", "abc"], ["none", None]]
    assert found["stack"] == "Traceback ...\nboom"
    assert f"{dead} has no dead letter at 0:11" in penstock("dlq", "show", dead, "0:11", code=1)[1]
    assert f"{dead} has no dead letter at 7:0" in penstock("dlq", "show", dead, "7:0", code=1)[1]


def test_names_that_lead_nowhere(penstock, office, orders, dead, unique):
    wrong = penstock("dlq", "replay", dead + "x", code=1)[1]
    assert f"there is no dead-letter topic {dead}x\n       did you mean {dead}?" in wrong
    assert "no dead-letter topic" in penstock("dlq", "list", unique("nothing"), code=1)[1]
    plain = office.create(unique("plain"))
    office.fill(plain, [Message(value=b"1")])
    assert f"{plain} holds no dead letters" in penstock("dlq", "list", plain, code=1)[1]
    penstock("dlq", "replay", dead, "--limit", "1")
    assert f"the dead letters are in {dead}" in penstock("dlq", "list", replayed_topic(dead), code=1)[1]
    # Share groups may be told to use any name.
    other = office.create(unique("graveyard"))
    office.fill(other, [letter(orders, 1)])
    assert len(lines(penstock("dlq", "list", other, "--json")[0])) == 1
    assert "may hold other records" in penstock("dlq", "purge", other, "--all", "-y", code=2)[1]


# Replaying


def test_back_as_they_were_and_once(penstock, answer, office, orders, dead):
    told = answer("dlq", "replay", dead, "--error", "TimeoutError")
    assert (told["replayed"], told["done_before"], told["stopped"]) == (10, 0, False)
    assert office.numbers(orders) == list(range(10, 20))
    for partition, record in office.read(orders):
        number = int(record.value)
        assert partition == number % 3
        assert (record.key, record.headers) == (b"k%d" % number, OWN)
        assert abs(record.timestamp - time.time() * 1000) < 60_000
    listed = {record.key: json.loads(record.value) for _, record in office.read(replayed_topic(dead))}
    assert listed.keys() == {b"%d:%d" % (number % 2, number // 2) for number in range(10, 20)}
    assert {(each["replay"], each["to"], each["state"]) for each in listed.values()} == {
        (told["replay"], orders, "replayed")
    }
    said = penstock("dlq", "replay", dead, "--keep-times")[1]
    assert (
        said == f"10 dead letters of {dead} replayed\n10 dead letters skipped, resolved before: 10 replayed\n"
    )
    assert office.numbers(orders) == list(range(20))
    assert {r.timestamp for _, r in office.read(orders) if int(r.value) < 10} == {
        MOMENT_MS + n for n in range(10)
    }
    assert penstock("dlq", "replay", dead)[1].startswith(
        f"0 dead letters of {dead} replayed\n20 dead letters skipped"
    )
    office.fill(dead, [letter(orders, 77)])
    assert answer("dlq", "replay", dead)["replayed"] == 1
    assert office.numbers(orders) == [*range(20), 77]


def test_a_dry_run_changes_nothing(penstock, answer, office, orders, dead):
    plan = answer("dlq", "replay", dead, "--dry-run", "--limit", "7")
    assert plan["would_replay"] == 7
    assert plan["to"] == [{"topic": orders, "group": None, "letters": 20}]
    out, told = penstock("dlq", "replay", dead, "--dry-run")
    assert out.splitlines()[1].split() == [orders, "-", "20"]
    assert told == "20 dead letters would be replayed\n"
    assert office.read(orders) == []
    with office.cluster() as cluster:
        assert not cluster.topics([replayed_topic(dead)])


def test_a_limit_goes_on_where_it_stopped_and_a_rate_takes_its_time(answer, office, orders, dead):
    assert answer("dlq", "replay", dead, "--limit", "6")["replayed"] == 6
    began = time.monotonic()
    assert answer("dlq", "replay", dead, "--limit", "8", "--rate", "10")["replayed"] == 8
    assert answer("dlq", "replay", dead, "--limit", "3", "--rate", "2")["replayed"] == 3
    assert time.monotonic() - began > 0.4, "three, of which the first two are free"
    assert answer("dlq", "replay", dead)["replayed"] == 3
    assert office.numbers(orders) == list(range(20))


def test_what_is_no_letter_is_left_out_and_told(penstock, answer, office, orders, unique):
    dead, elsewhere = f"{orders}.dlq", office.create(unique("elsewhere"))
    bare = letter(orders, 0)
    office.fill(
        dead,
        [
            Message(value=b"99"),
            bare._replace(value=None, headers=(*bare.headers, (WITHOUT_RECORD_HEADER, b"gone"))),
            letter(orders, 5, partition=17),
        ],
    )
    told = answer("dlq", "replay", dead)
    assert (told["replayed"], told["left_out"]) == (1, {"bare": 1, "stray": 1})
    assert (
        "1 dead letter skipped: they do not contain the original record" in penstock("dlq", "replay", dead)[1]
    )
    assert answer("dlq", "replay", dead, "--to", elsewhere)["replayed"] == 1
    assert (office.numbers(orders), office.numbers(elsewhere)) == ([5], [99])
    for to, complaint in (("never-made", "there is no topic never-made"), (dead, "cannot be replayed to")):
        assert complaint in penstock("dlq", "replay", dead, "--to", to, code=1)[1]
    office.fill(dead, [letter("never-made", 6)])
    told = penstock("dlq", "replay", dead, code=1)[1]
    assert "from topics that do not exist: never-made" in told
    assert "--to TOPIC" in told
    assert office.numbers(orders) == [5]


def test_what_a_topic_does_not_take_stays_and_the_others_get_through(answer, office, orders, unique):
    """One is too large, though it was not when it was compressed; and a compacted topic wants keys."""
    small, dead = office.create(unique("small"), 1, **{"max.message.bytes": "20000"}), f"{orders}.dlq"
    compressible, noise = b"0" * 300_000, bytes(range(256)) * 100
    office.fill(dead, [letter(small, n) for n in range(3)])
    office.fill(dead, [letter(small, 3, value=compressible), letter(small, 4, value=noise), letter(small, 5)])
    told = answer("dlq", "replay", dead, code=1)
    assert (told["replayed"], told["refused"]) == (5, 1)
    assert [len(record.value) for _, record in office.read(small)] == [1, 1, 1, 300_000, 1]
    assert answer("dlq", "replay", dead, code=1)["done_before"] == 5
    assert len(office.read(small)) == 5


def test_back_to_the_group_only(penstock, answer, office, orders, dead, unique):
    group = unique("billing")
    office.fill(dead, [letter(orders, 30, group=group, partition=2, handler="bill")])
    asked = ["dlq", "replay", dead, "--to", "group", "--group", group]
    told = penstock(*asked, code=1)[1]
    assert f"group {group} has no retries of {orders} (there is no topic {orders}.retry.1)" in told
    assert "--to original" in told
    retries = office.create(f"{orders}.retry.1", 3, **RETRY_SETTINGS)
    assert f"group {group} has no committed offset in {retries} yet" in penstock(*asked, "--dry-run")[1]
    with office.cluster() as cluster:
        commit_offsets(cluster, group, {(retries, 0): 0})
    assert penstock(*asked)[1] == f"1 dead letter of {dead} replayed\n"
    assert office.read(orders) == []
    [(partition, record)] = office.read(retries)
    assert partition == 2
    assert abs(record.timestamp - time.time() * 1000) < 60_000
    assert is_for_group(record.headers, group)
    assert not is_for_group(record.headers, "billing")
    origin = read_origin(record.headers, topic="", partition=0, offset=0, timestamp_ms=0)
    assert (origin.topic, origin.partition, origin.offset, origin.attempts) == (orders, 2, 30, 0)
    assert answer(*asked)["replayed"] == 0


def test_dead_letters_of_a_recreated_topic_are_different(answer, office, orders, dead):
    answer("dlq", "replay", dead)
    office.admin.delete_topics([dead])[dead].result(60)
    office.create(dead, 2)
    office.fill(dead, [letter(orders, 30)])
    assert answer("dlq", "replay", dead)["replayed"] == 1
    assert office.numbers(orders) == [*range(20), 30]


# Whose turn it is


def test_what_a_dead_tool_left_open_is_neither_waited_for_nor_seen(answer, office, orders, dead):
    with office.cluster() as cluster:
        answer("dlq", "replay", dead, "--limit", "2")
        killed = RawProducer(cluster, transactional_id=sink_transactional_id(replay_query_name(dead)))
        killed.init()
        for topic, key in ((orders, b"k"), (replayed_topic(dead), b"0:5")):
            killed.send(topic, 0, encode_batch([Record(0, 1, key, b"666")]))
        killed.flush()
        killed.close()
    assert answer("dlq", "replay", dead)["replayed"] == 18
    assert office.numbers(orders) == list(range(20))


def test_one_turn_for_all_tools_and_for_spark(office, orders, dead, unique):
    with office.cluster() as cluster, office.cluster() as other:
        first, second = SparkReplayLock(cluster, dead), SparkReplayLock(other, dead)
        assert first.name == sink_transactional_id(replay_query_name(dead))
        first.take()
        first.check()
        acquire_lock(other, replay_query_name(dead))  # as a replay on Spark does
        with pytest.raises(
            ReplayFenced, match="another replay of the same dead letters has acquired the lock"
        ):
            first.check()
        second.take()
        second.check()
        acquire_lock(cluster, replay_query_name(dead))
        with pytest.raises(ReplayFenced):
            second.check()


def test_who_is_overtaken_on_the_way_takes_the_turn_again(office, dead):
    """Another writer starts after the lock was taken, and before the producer exists that it would fence."""
    takes = []

    class Late(SparkReplayLock):
        def take(self):
            super().take()
            takes.append(self.name)
            if len(takes) == 1:
                acquire_lock(other, replay_query_name(dead))

    with office.cluster() as cluster, office.cluster() as other:
        acquire_lock(other, replay_query_name(dead))
        with locked_producer(cluster, Late(cluster, dead), dead) as producer:
            assert len(takes) == 2
            assert producer.transactional_id == takes[0]


def replay_of(cluster, dead, **options):
    request = ReplayRequest(topic=cluster.await_topic(dead), id="test", rate_per_s=4)
    clock = itertools.count(0, 10)
    return Replay(cluster, request, plan_replay(cluster, request), clock=lambda: next(clock), **options)


def test_what_was_replayed_since_the_survey_is_left_out(office, orders, dead):
    with office.cluster() as cluster, office.cluster() as other:
        slow, quick = replay_of(cluster, dead), replay_of(other, dead)
        assert quick.run(SparkReplayLock(other, dead)).replayed == 20
        outcome = slow.run(SparkReplayLock(cluster, dead))
        assert (outcome.replayed, outcome.done_before) == (0, 20)
    assert office.numbers(orders) == list(range(20))


def test_who_begins_takes_the_turn_from_who_was_before(office, orders, dead):
    """The first of two is in the middle when the second begins: it stops, and nothing is written twice."""
    with office.cluster() as cluster, office.cluster() as other:

        def begin_another(done):
            if done == 8:
                assert replay_of(other, dead).run(SparkReplayLock(other, dead)).replayed == 12

        first = replay_of(cluster, dead, progress=begin_another)
        with pytest.raises(
            ReplayFenced, match=f"another process has started to replay, edit or purge dead letters of {dead}"
        ):
            first.run(SparkReplayLock(cluster, dead))
        assert first.outcome.replayed == 8
    assert office.numbers(orders) == list(range(20))


def test_stopped_between_two_transactions(office, orders, dead):
    with office.cluster() as cluster:
        told = []
        stopped = replay_of(cluster, dead, progress=told.append, should_stop=lambda: told[-1:] == [12])
        outcome = stopped.run(SparkReplayLock(cluster, dead))
        assert (outcome.replayed, outcome.is_stopped) == (12, True)
        assert replay_of(cluster, dead).run(SparkReplayLock(cluster, dead)).replayed == 8
    assert office.numbers(orders) == list(range(20))


def test_a_bar_for_who_looks_on_and_an_end_between_two_letters(office, orders, dead):
    ours, theirs = pty.openpty()
    words = ["dlq", "replay", dead, "--rate", "4", "--bootstrap", office.bootstrap]
    with subprocess.Popen([*executable(), *words], stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        eventually(lambda: office.read(orders), what="the first letter")
        process.send_signal(signal.SIGTERM)
        told = b"".join(iter(lambda: _read(ours), b"")).decode()
        assert process.wait(20) == 1
    os.close(ours)
    replayed = len(office.read(orders))
    assert f"{replayed}/20" in told
    assert f"{replayed} dead letters of {dead} replayed" in told
    assert "stopped; run it again to continue" in told
    assert 0 < replayed < 20


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # how a terminal reports that the other end is closed
        return b""


# Correcting


def test_the_corrected_one_is_what_is_replayed(penstock, answer, office, orders, dead):
    told = answer("dlq", "edit", dead, "0:2", "--value", "400", "-H", "trace=new", "-H", "why=typo")
    assert told == {"topic": dead, "edited": "0:2", "letter": {"partition": 0, "offset": 10}}
    shown = answer("dlq", "show", dead, "0:10")
    assert (shown["value"], shown["key"], shown["edited_from"]) == ("400", "k4", "0:2")
    assert shown["headers"] == [["none", None], ["trace", "new"], ["why", "typo"]]
    assert shown["origin"]["offset"] == 4
    assert answer("dlq", "show", dead, "0:2")["state"] == "edited"
    assert "0:2 was edited already" in penstock("dlq", "edit", dead, "0:2", "--value", "5", code=1)[1]
    penstock("dlq", "edit", dead, "0:10", "--key", "other", "--value", "-", given="401")
    assert answer("dlq", "replay", dead)["replayed"] == 20
    assert office.numbers(orders) == sorted([*range(4), *range(5, 20), 401])
    [record] = [record for _, record in office.read(orders) if record.value == b"401"]
    assert record.key == b"other"
    assert record.headers == (("none", None), ("trace", b"new"), ("why", b"typo"))
    told = penstock("dlq", "edit", dead, "0:3", "--value", "5", code=1)[1]
    assert f"0:3 was replayed to {orders} already" in told


def test_in_the_users_own_editor(penstock, answer, office, orders, monkeypatch, tmp_path):
    dead = f"{orders}.dlq"
    office.fill(
        dead, [letter(orders, 0, value=b'{"colour":"rde","n":1}'), letter(orders, 1, value=b"\xff\xfe")]
    )
    monkeypatch.delenv("VISUAL", raising=False)
    assert "an editor needs a terminal" in penstock("dlq", "edit", dead, "0:0", code=2)[1]
    script = tmp_path / "editor"
    for does, complaint in (
        ("exit 3", "the editor ended with code 3: nothing was changed"),
        ("true", "0:0 has these values already"),
        ('echo no >> "$1"', "the value was JSON and no longer is"),
    ):
        script.write_text(f"#!/bin/sh\n{does}\n")
        monkeypatch.setenv("EDITOR", f"sh {script}")
        assert complaint in penstock("dlq", "edit", dead, "0:0", "--editor", code=1)[1]
    monkeypatch.setenv("EDITOR", "no-such-editor")
    assert "no-such-editor cannot be started" in penstock("dlq", "edit", dead, "0:0", "--editor", code=1)[1]
    assert "is not text" in penstock("dlq", "edit", dead, "0:1", "--editor", code=1)[1]
    monkeypatch.setenv("EDITOR", "sed -i s/rde/red/")
    assert f"{dead} 0:0 is now 0:2\n" in penstock("dlq", "edit", dead, "0:0", "--editor")[1]
    assert answer("dlq", "show", dead, "0:2")["value"] == '{"colour":"red","n":1}'
    told = penstock("dlq", "edit", dead, "0:2", "--value", f"@{tmp_path / 'none'}", code=2)[1]
    assert "cannot be read" in told
    (tmp_path / "new").write_bytes(b"\x00new")
    penstock("dlq", "edit", dead, "0:2", "--value", f"@{tmp_path / 'new'}")
    assert office.read(dead)[-1][1].value == b"\x00new"


# Giving up


def test_what_is_given_up_is_not_replayed_and_deleted_from_the_beginning_on(
    penstock, answer, office, orders, dead
):
    assert "add --yes" in penstock("dlq", "purge", dead, "--error", "TimeoutError", code=2)[1]
    plan = answer("dlq", "purge", dead, "--error", "TimeoutError", "--dry-run")
    assert plan == {
        "topic": dead,
        "dry_run": True,
        "would_give_up": 10,
        "would_delete": 0,
        "still_waiting": 10,
    }
    told = answer("dlq", "purge", dead, "--error", "TimeoutError", "-y")
    assert (told["given_up"], told["deleted"], told["beginnings"]) == (10, 0, {})
    assert {
        each["state"] for each in lines(penstock("dlq", "list", dead, "--error", "Time*", "--json")[0])
    } == {"purged"}
    # What lies before the first that waits can go.
    assert answer("dlq", "replay", dead, "--partition", "0", "--limit", "3")["replayed"] == 3
    told = answer("dlq", "purge", dead, "-y")
    assert (told["given_up"], told["deleted"], told["still_waiting"]) == (0, 3, 7)
    assert told["beginnings"] == {"0": 3}
    assert answer("dlq", "replay", dead)["replayed"] == 7
    assert office.numbers(orders) == list(range(10))
    assert answer("dlq", "purge", dead, "-y")["deleted"] == 17
    assert office.read(dead) == []
    assert "0 dead letters marked as purged, 0 deleted" in penstock("dlq", "purge", dead)[1]


def test_all_of_it(penstock, answer, office, orders, dead):
    assert (
        "--all cannot be combined with filters"
        in penstock("dlq", "purge", dead, "--all", "-p", "0", code=2)[1]
    )
    answer("dlq", "replay", dead, "--limit", "5")
    told = answer("dlq", "purge", dead, "--all", "-y")
    assert (told["given_up"], told["deleted"], told["still_waiting"]) == (15, 20, 0)
    assert office.read(dead) == []
    office.fill(dead, [letter(orders, 40)])
    assert answer("dlq", "replay", dead)["replayed"] == 1


# Of share groups


@pytest.mark.usefixtures("tuned_broker")
def test_dead_letters_of_a_share_group_are_replayed_to_all_groups(penstock, answer, office, unique):
    """The broker writes these letters, and there is no topic of retries: only the original topic is a way back."""
    topic, group = office.create(unique("jobs")), unique("workers")
    share.configure(office.admin, group, share_auto_offset_reset="earliest")
    office.fill(topic, [Message(value=b"1", key=b"k", headers=(("trace", b"abc"),))])
    worker = share.share_consumer(office.bootstrap, group, topic)
    try:
        share.take(worker, 1, lambda _: share.REJECT)
        dead = f"{topic}.dlq"
        eventually(
            lambda: office.admin.list_topics(timeout=20).topics.get(dead), what="a topic of dead letters"
        )
        eventually(lambda: office.read(dead), what="a dead letter")
        [found] = lines(penstock("dlq", "list", group, "--json")[0])
        assert (found["reason"], found["attempts"], found["origin"]["topic"]) == ("rejected", 1, topic)
        assert "rejected" in penstock("dlq", "list", topic)[0]
        assert "has no retries" in penstock("dlq", "replay", topic, "--to", "group", code=1)[1]
        office.create(f"{topic}.retry.1")
        assert "is a share group" in penstock("dlq", "replay", topic, "--to", "group", code=1)[1]
        assert answer("dlq", "replay", topic)["replayed"] == 1
        [again] = share.take(worker, 1)
        assert (again.value(), again.key(), again.headers()) == (b"1", b"k", [("trace", b"abc")])
    finally:
        worker.close()


def test_the_list_tells_how_old_letters_are_and_how_long_they_are_kept(
    penstock, answer, office, unique, bootstrap
):
    orders = office.create(unique("orders"), 1)
    with Penstock(bootstrap) as app, app.consumer(orders, group="g", dead_letters=True) as consumer:
        app.publish(orders, b"bad")
        (message,) = consumer.poll(timeout="30s")
        consumer.reject(message, "bad")
        consumer.commit()
    (found,) = [each for each in answer("dlq", "list") if each["topic"] == f"{orders}.dlq"]
    days = 24 * 60 * 60 * 1000
    assert found["retention"] == 30 * days
    assert 29 * days < found["oldest_left"] <= 30 * days
    (line,) = [each for each in penstock("dlq", "list")[0].splitlines() if f"{orders}.dlq" in each]
    assert " 29d " in line


@pytest.mark.parametrize(("source_days", "days"), [(7, 30), (90, 90), (None, None)])
def test_letters_are_kept_for_longer_than_their_source(
    answer, unique, bootstrap, source_days: int | None, days: int | None
):
    def in_ms(length: int | None) -> int:
        return -1 if length is None else length * 24 * 60 * 60 * 1000

    orders = unique("orders")
    with Penstock(bootstrap) as app:
        app.create_topic(orders, partitions=1, settings={"retention.ms": str(in_ms(source_days))})
        with app.consumer(orders, group="g", retry=2):
            pass
    settings = answer("topic", "describe", f"{orders}.dlq")[0]["settings"]
    assert settings["retention.ms"] == str(in_ms(days))
    assert (settings["cleanup.policy"], settings["retention.bytes"]) == ("delete", "-1")
    assert "retention.ms" not in answer("topic", "describe", f"{orders}.retry.1")[0]["settings"]
