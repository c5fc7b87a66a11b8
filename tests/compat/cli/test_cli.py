"""The `penstock` command in a process of its own, with a real broker."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.brokers import BrokerProcess, executable


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [*executable(), *words],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **options.pop("env", {})},
        # A suite that runs in the background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@contextmanager
def reading(*words: str, bootstrap: str) -> Iterator[subprocess.Popen[str]]:
    """`penstock consume` in a process of its own, which does not outlive the test."""
    process = start("consume", *words, env={"PENSTOCK_BOOTSTRAP": bootstrap})
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(*words: str, given: str | None = None, code: int = 0, **options: Any) -> tuple[str, str]:
    process = start(*words, stdin=subprocess.PIPE, **options)
    out, err = process.communicate(given or "", timeout=60)
    assert process.returncode == code, (words, out, err)
    assert "Traceback" not in err, err
    return out, err


def test_the_installed_command(bootstrap: str, unique: Callable[[str], str]) -> None:
    name, environment = unique("topic"), {"PENSTOCK_BOOTSTRAP": bootstrap}
    run("topic", "create", name, env=environment)
    assert run("produce", name, given="one\ntwo\n", env=environment)[0] == ""
    assert run("consume", name, "-e", env=environment) == ("one\ntwo\n", "")
    assert json.loads(run("topic", "describe", name, "--json", env=environment)[0])[0]["topic"] == name
    assert "no broker at localhost:1" in run("topic", "list", "-b", "localhost:1", code=1)[1]


def test_a_topic_from_birth_to_death(penstock: Any, answer: Any, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    assert penstock("topic", "create", name, "-p", "2", "-c", "retention.ms=60000") == (
        "",
        f"{name} created\n",
    )
    assert answer("topic", "create", name, "--if-not-exists") == [{"topic": name, "created": False}]
    assert "already exists" in penstock("topic", "create", name, code=1)[1]

    penstock("topic", "alter", name, "-p", "3", "-c", "segment.bytes=1048576", "-d", "retention.ms")
    [described] = answer("topic", "describe", name)
    assert described["settings"] == {"segment.bytes": "1048576"}
    assert [part["partition"] for part in described["partitions"]] == [0, 1, 2]
    assert described["partitions"][0].keys() == {
        "partition", "leader", "replicas", "in_sync", "first_offset", "next_offset", "records",
    }  # fmt: skip
    [listed] = [row for row in answer("topic", "list") if row["topic"] == name]
    assert listed == {"topic": name, "partitions": 3, "replicas": 1, "records": 0}

    assert "add --yes" in penstock("topic", "delete", name, code=2)[1]
    assert answer("topic", "delete", name, "--yes") == [{"topic": name, "deleted": True}]
    assert f"topic {name} does not exist" in penstock("topic", "describe", name, code=1)[1]


def test_a_dry_run_creates_nothing(penstock: Any, answer: Any, unique: Callable[[str], str]) -> None:
    name = unique("topic")
    assert penstock("topic", "create", name, "--dry-run")[1] == f"{name} would be created\n"
    assert name not in [row["topic"] for row in answer("topic", "list")]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["topic", "create", "a/b"], "a/b"),
        (["topic", "create", "t", "-c", "no.such.setting=1"], "no.such.setting"),
        (["topic", "create", "t", "-c", "retention.ms=soon"], "retention.ms"),
        (["topic", "create", "t", "-r", "9"], "replication factor"),
        (["topic", "create", "t", "-p", "99999999999"], "a number in CreateTopics is out of range"),
        (["consume", "no-such-topic"], "topic no-such-topic does not exist"),
        (["group", "describe", "no-such-group"], "group no-such-group does not exist"),
        (["group", "delete", "no-such-group", "-y"], "group no-such-group does not exist"),
    ],
)
def test_what_the_broker_refuses_is_said_in_a_sentence(
    penstock: Any, words: list[str], complaint: str
) -> None:
    out, err = penstock(*words, code=1)
    assert out == ""
    assert complaint.lower() in err.lower()


@pytest.mark.parametrize("option", [("-p", "99999999999"), ("--timeout", "1e300")])
def test_numbers_that_the_client_library_cannot_hold(penstock: Any, option: tuple[str, str]) -> None:
    err = penstock("produce", "t", "x", *option, code=2)[1]
    assert option[0] in err
    assert "Traceback" not in err


def test_records_go_in_and_come_out_with_keys_and_headers(penstock: Any, topic: str) -> None:
    _, err = penstock("produce", topic, "-K", ":", "-H", "a=b", given="k1:one\nk2:two\r\n")
    assert err == f"2 records to {topic} (partition 0 offset 0-1)\n"
    penstock("produce", topic, "three", "four", "--key", "k3")
    out, _ = penstock("consume", topic, "-e", "--keys", "--headers")
    assert out == "a=b\tk1\tone\na=b\tk2\ttwo\n\tk3\tthree\n\tk3\tfour\n"


def test_every_codec_and_every_kind_of_acks(penstock: Any, topic: str) -> None:
    ways = [("none", "0"), ("gzip", "1"), ("snappy", "all"), ("lz4", "all"), ("zstd", "all")]
    for codec, acks in ways:
        penstock("produce", topic, "-z", codec, "--acks", acks, given=f"{codec}\n" * 20)
    expected = "".join(f"{codec}\n" * 20 for codec, _ in ways)
    assert penstock("consume", topic, "-n", "100")[0] == expected


def test_json_carries_everything_from_one_topic_to_another(
    penstock: Any, new_topic: Callable[..., str]
) -> None:
    source, target = (new_topic(**{"retention.ms": "-1"}) for _ in range(2))
    lines = [
        {"key": "k", "value": {"base64": "/wA="}, "headers": [["h", None], ["h", "ü"]], "timestamp": 1000},
        {"key": None, "value": "text", "headers": [], "timestamp": 2000},
        {"key": "gone", "value": None, "headers": [], "timestamp": 3000},
    ]
    written = "".join(json.dumps(line) + "\n" for line in lines)
    placed, _ = penstock("produce", source, "-f", "json", "--json", given=written)
    assert [json.loads(line)["offset"] for line in placed.splitlines()] == [0, 1, 2]
    first, _ = penstock("consume", source, "-e", "--json")
    penstock("produce", target, "-f", "json", given=first)
    second, _ = penstock("consume", target, "-e", "--json")
    expected = [{"partition": 0, "offset": offset, **line} for offset, line in enumerate(lines)]
    assert [json.loads(line) for line in first.splitlines()] == [
        {"topic": source, **line} for line in expected
    ]
    assert [json.loads(line) for line in second.splitlines()] == [
        {"topic": target, **line} for line in expected
    ]


def test_a_file_is_read_line_by_line(penstock: Any, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"00ff\n\n6869\n")
    penstock("produce", topic, "--file", str(file), "-f", "hex")
    assert penstock("consume", topic, "-e", "-f", "hex")[0] == "00ff\n\n6869\n"
    assert "cannot read" in penstock("produce", topic, "--file", str(tmp_path / "absent"), code=1)[1]


def test_a_line_that_does_not_fit_is_named_and_what_came_before_is_kept(penstock: Any, topic: str) -> None:
    assert (
        "line 2: not hexadecimal" in penstock("produce", topic, "-f", "hex", given="00\nxx\n11\n", code=1)[1]
    )
    assert penstock("consume", topic, "-e", "-f", "hex")[0] == "00\n"


def test_records_that_are_refused_say_why(penstock: Any, new_topic: Callable[..., str]) -> None:
    compacted, small = new_topic(**{"cleanup.policy": "compact"}), new_topic(**{"max.message.bytes": "500"})
    assert "a compacted topic needs a key" in penstock("produce", compacted, "v", code=1)[1]
    assert "size too large" in penstock("produce", small, given="x" * 2_000_000, code=1)[1]
    assert f"topic {small} has no such partition" in penstock("produce", small, "v", "-p", "9", code=1)[1]


def test_reading_starts_where_one_says(penstock: Any, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"retention.ms": "-1"})
    lines = "".join(json.dumps({"value": str(n), "timestamp": 1000 + n}) + "\n" for n in range(5))
    penstock("produce", topic, "-f", "json", given=lines)

    def read(start: str) -> str:
        return "".join(penstock("consume", topic, "-e", "--from", start)[0].split())

    assert [
        read(start) for start in ("beginning", "3", "-2", "@1001", "1970-01-01T00:00:01.004Z", "end")
    ] == [
        "01234",
        "34",
        "34",
        "1234",
        "4",
        "",
    ]
    assert penstock("consume", topic, "-n", "2")[0] == "0\n1\n"
    assert penstock("consume", topic, "--from", "end", "--timeout", "0.5")[0] == ""


def test_chosen_partitions(penstock: Any, new_topic: Callable[..., str]) -> None:
    topic = new_topic(3)
    for partition in range(3):
        penstock("produce", topic, f"to-{partition}", "-p", str(partition))
    assert penstock("consume", topic, "-e", "-p", "1")[0] == "to-1\n"
    assert sorted(penstock("consume", topic, "-e", "-p", "0", "-p", "2")[0].split()) == ["to-0", "to-2"]
    assert "has no partition 3" in penstock("consume", topic, "-p", "3", code=1)[1]


def test_a_group_goes_on_where_it_was_and_shows_its_lag(
    penstock: Any, answer: Any, topic: str, group: str
) -> None:
    penstock("produce", topic, given="".join(f"{n}\n" for n in range(10)))
    assert penstock("consume", topic, "-g", group, "-n", "4")[0] == "0\n1\n2\n3\n"
    [described] = answer("group", "describe", group)
    assert described["state"] == "empty"
    assert described["lag"] == 6
    assert described["partitions"] == [
        {
            "topic": topic, "partition": 0, "committed": 4, "end": 10, "lag": 6,
            "member": None, "client": None, "host": None,
        }
    ]  # fmt: skip
    assert group in [row["group"] for row in answer("group", "list")]
    assert penstock("consume", topic, "-g", group, "-e")[0] == "4\n5\n6\n7\n8\n9\n"


def test_a_group_is_reset_only_after_a_look_and_a_yes(
    penstock: Any, answer: Any, topic: str, group: str
) -> None:
    penstock("produce", topic, given="".join(f"{n}\n" for n in range(10)))
    penstock("consume", topic, "-g", group, "-e")

    def committed() -> int:
        return int(answer("group", "describe", group)[0]["partitions"][0]["committed"])

    out, err = penstock("group", "reset", group, "--to-earliest", "--dry-run")
    assert out.splitlines()[1].split() == [topic, "0", "10", "0"]
    assert "nothing was changed" in err
    assert "add --yes" in penstock("group", "reset", group, "--to-earliest", code=2)[1]
    assert committed() == 10

    positions = []
    for target in (["--shift-by", "-3"], ["--to-offset", "2"], ["--to-latest"], ["--to-timestamp", "1h"]):
        document = answer("group", "reset", group, *target, "--yes")
        assert document["applied"] is True
        positions.append(committed())
    assert positions == [7, 2, 10, 0]
    assert penstock("consume", topic, "-g", group, "-n", "1")[0] == "0\n"


def test_a_group_can_be_placed_on_a_topic_that_it_has_not_read(
    answer: Any, penstock: Any, topic: str, group: str
) -> None:
    assert "has no committed offsets" in penstock("group", "reset", group, "--to-earliest", code=1)[1]
    penstock("produce", topic, "a", "b")
    assert answer("group", "reset", group, "--topic", f"{topic}:0", "--to-offset", "1", "-y")[
        "partitions"
    ] == [{"topic": topic, "partition": 0, "from": None, "to": 1}]
    assert penstock("consume", topic, "-g", group, "-e")[0] == "b\n"


def test_a_group_with_members_is_neither_reset_nor_deleted(
    penstock: Any, answer: Any, bootstrap: str, topic: str, group: str
) -> None:
    penstock("produce", topic, "a")
    with reading(topic, "-g", group, bootstrap=bootstrap) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "a\n"
        [described] = answer("group", "describe", group)
        assert (described["state"], described["partitions"][0]["client"]) == ("stable", "penstock-cli")
        penstock("group", "reset", group, "--topic", topic, "--to-earliest", "--yes", code=1)
        assert "has members" in penstock("group", "delete", group, "--yes", code=1)[1]
        reader.send_signal(signal.SIGTERM)
        assert reader.wait(timeout=30) == 0
    assert answer("group", "describe", group)[0]["partitions"][0]["committed"] == 1
    assert answer("group", "delete", group, "--yes") == [{"group": group, "deleted": True}]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_reader_ends_quietly(
    bootstrap: str, penstock: Any, topic: str, ending: signal.Signals
) -> None:
    penstock("produce", topic, "a")
    with reading(topic, bootstrap=bootstrap) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "a\n"
        reader.send_signal(ending)
        assert reader.communicate(timeout=30) == ("", "")
        assert reader.returncode == 0


def test_a_pipe_that_closes_ends_the_reader_even_on_a_quiet_topic(
    bootstrap: str, penstock: Any, topic: str
) -> None:
    penstock("produce", topic, "the only one, so that no further write could notice")
    with reading(topic, bootstrap=bootstrap) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        reader.stdout.readline()
        reader.stdout.close()
        assert reader.wait(timeout=30) == 0
        assert reader.stderr.read() == ""


def test_a_pipe_that_closes_in_the_middle_is_no_failure(bootstrap: str, penstock: Any, topic: str) -> None:
    penstock("produce", topic, given="x" * 1000 + "\n" + "y\n" * 100_000)
    with reading(topic, bootstrap=bootstrap) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        reader.stdout.close()
        assert reader.wait(timeout=30) == 0
        assert reader.stderr.read() == ""


def test_the_cluster(answer: Any, penstock: Any, bootstrap: str, topic: str) -> None:
    penstock("produce", topic, "a")
    document = answer("cluster", "info")
    assert document.keys() == {
        "cluster_id",
        "controller",
        "nodes",
        "features",
        "topics",
        "partitions",
        "bytes",
    }
    assert document["controller"] in [node["node"] for node in document["nodes"]]
    assert bootstrap in [f"{node['host']}:{node['port']}" for node in document["nodes"]]
    assert "metadata.version" in document["features"]
    assert document["bytes"] > 0
    assert document["cluster_id"] in penstock("cluster", "info")[0]


def test_the_levels_of_features_are_shown_raised_and_lowered(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data").start()
    try:
        at = ("-b", broker.bootstrap_servers)

        def levels(*words: str) -> dict[str, int]:
            rows = json.loads(run("cluster", "features", *words, *at, "--json")[0])
            return {row["feature"]: row["level"] for row in rows}

        before = levels()
        assert before["transaction.version"] == 2
        assert (
            "this needs a confirmation" in run("cluster", "features", "transaction.version=0", *at, code=2)[1]
        )
        assert levels() == before
        lowered = {"transaction.version": 0, "share.version": 0}
        assert levels("transaction.version=0", "share.version=0", "--yes") == before | lowered
        assert levels("transaction.version=1") == before | lowered | {"transaction.version": 1}
        for wrong, why in (
            ("transaction.version=9", "has levels 0 to 2, not 9"),
            ("teleport.version=1", "no feature teleport.version"),
            ("transaction.version=two", "a level is a whole number"),
            ("transaction.version", "takes NAME=VALUE"),
        ):
            assert why in run("cluster", "features", "share.version=1", wrong, *at, code=2)[1]
        assert levels()["share.version"] == 0, "all of them or none"
        assert "transaction.version" in run("cluster", "features", *at)[0]
    finally:
        broker.stop()


def test_serve_refuses_in_one_line_what_cannot_work(fresh_broker: BrokerProcess, tmp_path: Path) -> None:
    address = fresh_broker.bootstrap_servers
    _, taken = run("serve", "--listen", address, "--data-dir", str(tmp_path / "other"), code=1)
    assert f"cannot listen on PLAINTEXT://{address}: Address already in use" in taken
    _, locked = run("serve", "--listen", "localhost:0", "--data-dir", str(fresh_broker.data_dir), code=1)
    assert "in use by another process" in locked
    (tmp_path / "file").touch()
    _, no_folder = run("serve", "--listen", "localhost:0", "--data-dir", str(tmp_path / "file"), code=1)
    assert "is not a directory" in no_folder


def test_serve_greets_newcomers_with_commands_that_work(tmp_path: Path) -> None:
    broker = start("serve", "--listen", "localhost:0", "--data-dir", str(tmp_path / "data"), "--welcome")
    try:
        assert broker.stdout is not None
        lines: list[str] = []
        for line in broker.stdout:
            lines.append(line)
            if "bootstrap.servers" in line:
                break
        assert lines[0].startswith("listening on PLAINTEXT://localhost:")
        address = lines[-1].strip().rpartition("=")[2]
        tries = [line.strip() for line in lines if f"PENSTOCK_BOOTSTRAP={address}" in line]
        assert len(tries) == 4
        for line in tries:
            limit = " -n 1" if " consume " in line else ""
            subprocess.run(line + limit, shell=True, check=True, capture_output=True, timeout=60)
    finally:
        broker.send_signal(signal.SIGINT)
        broker.communicate(timeout=30)
    assert broker.returncode == 0


def test_serve_may_open_more_files_than_shells_allow(tmp_path: Path) -> None:
    words = [*executable(), "serve", "--listen", "localhost:0", "--data-dir", str(tmp_path / "data")]
    command = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout is not None
            assert "listening on" in broker.stdout.readline()
            allowed, most = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
            assert allowed == most > 256
        finally:
            broker.terminate()
    assert broker.returncode == 0


def test_several_listeners_each_advertise_themselves(tmp_path: Path) -> None:
    broker = start(
        "serve", "--listen", "IN://127.0.0.1:0", "--listen", "OUT://127.0.0.1:0", "--advertise", "OUT://localhost:0",
        "--data-dir", str(tmp_path / "data"),
    )  # fmt: skip
    try:
        assert broker.stdout is not None
        addresses = [broker.stdout.readline().split("://")[1].strip() for _ in range(2)]
        inside, outside = (
            json.loads(run("cluster", "info", "--json", "-b", address)[0])["nodes"][0]
            for address in addresses
        )
        assert f"{inside['host']}:{inside['port']}" == addresses[0]
        assert f"{outside['host']}:{outside['port']}" == addresses[1].replace("127.0.0.1", "localhost")
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.communicate(timeout=30)


def test_records_that_arrive_while_reading_are_printed(bootstrap: str, penstock: Any, topic: str) -> None:
    with reading(topic, "-n", "2", bootstrap=bootstrap) as reader:
        assert reader.stdout is not None
        penstock("produce", topic, "early")
        assert reader.stdout.readline() == "early\n"
        penstock("produce", topic, "late")
        assert reader.communicate(timeout=30)[0] == "late\n"
