"""Settings of a node: precedence, sources, listeners, and the errors for invalid values."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.broker.config.listeners import Listener, parse_address, parse_advertised, parse_listeners
from penstock.broker.config.node_settings import (
    NODE_SETTINGS,
    OTHER_VARIABLES,
    InvalidSetting,
    NodeSettings,
    load_settings,
    variable_name,
)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def with_flags(**flags: str) -> NodeSettings:
    return load_settings({name.replace("_", "."): text for name, text in flags.items()}, {})


def test_every_default_is_a_value_that_a_user_could_have_written() -> None:
    for setting in NODE_SETTINGS.values():
        if setting.default is not None:
            text = setting.text(setting.default)
            assert text is not None
            assert setting.parse(text) == setting.default, setting.name


def test_every_setting_is_documented_and_has_its_own_variable() -> None:
    variables = [variable_name(name) for name in NODE_SETTINGS]
    assert len(set(variables)) == len(variables)
    assert not set(variables) & OTHER_VARIABLES.keys()
    assert all(setting.doc.endswith(".") for setting in NODE_SETTINGS.values())


def test_every_setting_is_read_by_the_node() -> None:
    """A setting that is accepted and does nothing would be a lie."""
    package = Path(penstock.__file__).parent
    sources = [file for room in ("broker", "cluster") for file in (package / room).rglob("*.py")]
    code = "".join(file.read_text() for file in sources if file.name != "settings_table.py")
    unread = [name for name in NODE_SETTINGS if f'"{name}"' not in code]
    assert [name for name in unread if not NODE_SETTINGS[name].doc.startswith("Accepted for compat")] == []


def test_every_default_that_differs_from_apache_kafkas_is_on_the_page_of_differences() -> None:
    page = (Path(__file__).parents[4] / "docs" / "differences.md").read_text()
    differing = [name for name, setting in NODE_SETTINGS.items() if "Apache Kafka's default" in setting.doc]
    assert len(differing) > 10
    assert [name for name in differing if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node.id", 1),
        ("message.max.bytes", 1_048_588),
        ("socket.request.max.bytes", 104_857_600),
        ("fetch.max.bytes", 57_671_680),
        ("offsets.topic.num.partitions", 50),
        ("log.retention.hours", 168),
        ("log.segment.bytes", 1_073_741_824),
        ("auto.create.topics.enable", True),
        ("log.cleanup.policy", ("delete",)),
        ("penstock.flush", "ack"),
    ],
)
def test_defaults_that_clients_and_operators_rely_on(name: str, value: object) -> None:
    assert load_settings({}, {})[name] == value


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = write(
        tmp_path / "node.toml",
        "num.partitions = 2\nnode.id = 2\nlog.retention.hours = 2\nlog.roll.hours = 2\n",
    )
    environ = {"PENSTOCK_NUM_PARTITIONS": "3", "PENSTOCK_NODE_ID": "3"}
    settings = load_settings(
        {"num.partitions": "4"}, environ, file, flag_names={"num.partitions": "--partitions"}
    )
    assert [
        settings[name] for name in ("num.partitions", "node.id", "log.retention.hours", "group.max.size")
    ] == [
        4,
        3,
        2,
        10_000,
    ]
    assert settings.source("num.partitions") == ("flag", "--partitions")
    assert settings.source("node.id") == ("environment", "PENSTOCK_NODE_ID")
    assert settings.source("log.roll.hours") == ("file", file)
    assert str(settings.source("group.max.size")) == "default"


def test_toml_names_nest_or_are_quoted_and_values_keep_their_meaning(tmp_path: Path) -> None:
    file = write(
        tmp_path / "node.toml",
        """
        listeners = ["A://localhost:1", "B://localhost:2"]
        auto.create.topics.enable = false
        "max.connections" = 10
        "max.connections.per.ip" = 5
        log.cleaner.min.cleanable.ratio = 0.25
        [penstock]
        flush = "never"
        """,
    )
    settings = load_settings({}, {}, file)
    assert [listener.name for listener in settings.listeners] == ["A", "B"]
    assert settings.boolean("auto.create.topics.enable") is False
    assert (settings.integer("max.connections"), settings.integer("max.connections.per.ip")) == (10, 5)
    assert settings.number("log.cleaner.min.cleanable.ratio") == 0.25
    assert settings.string("penstock.flush") == "never"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("num.partitons = 2", "Unknown setting num.partitons (file {path}); did you mean num.partitions?"),
        (
            "num.partitions = 0",
            "Invalid value 0 for configuration num.partitions: must be at least 1 (file {path})",
        ),
        ("log.cleaner.dedupe.buffer.size = 1", "must be at least 1048576 (file {path})"),
        ("num.partitions = ", "{path} is not valid TOML"),
        ("max.connections = 1\nmax.connections.per.ip = 1", "quote a name that is the beginning of another"),
        ("num.partitions = 2020-01-01", "num.partitions must be text, a number"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_a_hint(tmp_path: Path, document: str, words: str) -> None:
    file = write(tmp_path / "node.toml", document)
    with pytest.raises(InvalidSetting) as caught:
        load_settings({}, {}, file)
    assert words.format(path=file) in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"Cannot read .*absent.toml: No such file"):
        load_settings({}, {}, str(tmp_path / "absent.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidSetting, match="not valid TOML"):
        load_settings({}, {}, str(tmp_path / "binary.toml"))


def test_a_mistyped_variable_is_refused_but_a_kubernetes_service_is_not_ours_to_judge() -> None:
    with pytest.raises(
        InvalidSetting, match=r"PENSTOCK_NUM_PARTITON; did you mean PENSTOCK_NUM_PARTITIONS\?"
    ):
        load_settings({}, {"PENSTOCK_NUM_PARTITON": "3"})
    environ = {
        "PENSTOCK_PORT": "tcp://10.0.0.1:9092",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_BROKER_SERVICE_PORT_KAFKA": "9092",
        "PENSTOCK_PORT_9092_TCP_ADDR": "10.0.0.1",
        "PENSTOCK_BOOTSTRAP": "elsewhere:9092",
        "HOME": "/",
    }
    assert not load_settings({}, environ).origins


def test_a_wrong_value_names_where_it_was_written() -> None:
    with pytest.raises(
        InvalidSetting, match=r"penstock.flush: must be one of .*\(environment PENSTOCK_FLUSH\)"
    ):
        load_settings({}, {"PENSTOCK_FLUSH": "sometimes"})
    with pytest.raises(InvalidSetting, match=r"Unknown setting nonsense.nowhere \(flag --set\)$"):
        load_settings({"nonsense.nowhere": "1"}, {})
    with pytest.raises(InvalidSetting, match=r"log.cleanup.policy must not be empty"):
        load_settings({"log.cleanup.policy": ""}, {})
    with pytest.raises(InvalidSetting, match="single data folder"):
        load_settings({"log.dirs": "/a,/b"}, {})
    with pytest.raises(InvalidSetting, match="must not be above"):
        load_settings({"group.min.session.timeout.ms": "1800001"}, {})
    with pytest.raises(InvalidSetting, match=r"ratio.all must not be above penstock.shed"):
        load_settings({"penstock.shed.disk.free.ratio.all": "0.5"}, {})
    with pytest.raises(
        InvalidSetting, match=r"Invalid penstock.http.listen .flag --http.: '9644' is not HOST:PORT"
    ):
        load_settings({"penstock.http.listen": "9644"}, {}, flag_names={"penstock.http.listen": "--http"})


def test_addresses_as_people_write_them() -> None:
    assert parse_address("localhost:9092") == ("localhost", 9092)
    assert parse_address("[::1]:0") == ("::1", 0)
    assert parse_address(":9092") == ("", 9092)
    assert [str(listener) for listener in parse_listeners("localhost:1, EXTERNAL://[::]:2")] == [
        "PLAINTEXT://localhost:1",
        "EXTERNAL://[::]:2",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("localhost", "not HOST:PORT"),
        ("localhost:", "not HOST:PORT"),
        ("localhost:-1", "not HOST:PORT"),
        ("localhost:99999", "above 65535"),
        ("::1:9092", "brackets"),
        ("a b://h:1", "name of letters"),
        ("h:1,h:2", "two listeners are named PLAINTEXT"),
        ("", "at least one"),
    ],
)
def test_listeners_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        load_settings({"listeners": text}, {})


def test_each_listener_is_advertised_as_told_or_as_bound() -> None:
    listeners = parse_listeners("IN://0.0.0.0:1,OUT://0.0.0.0:2,LOCAL://localhost:0")
    assert parse_advertised("OUT://broker.example:29092", listeners, "host7") == (
        Listener("IN", "host7", 1),
        Listener("OUT", "broker.example", 29092),
        Listener("LOCAL", "localhost", 0),
    )


def test_an_advertised_address_without_a_name_is_that_of_the_only_listener() -> None:
    settings = load_settings({"listeners": "OUT://0.0.0.0:1", "advertised.listeners": "broker:9"}, {})
    assert settings.advertised == (Listener("OUT", "broker", 9),)


@pytest.mark.parametrize(
    ("advertised", "words"),
    [("OTHER://h:1", "no listener is named OTHER"), ("0.0.0.0:1", "not an address that")],
)
def test_advertised_addresses_that_are_refused(advertised: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        load_settings({"advertised.listeners": advertised}, {})


def test_paths_and_optional_values() -> None:
    settings = with_flags(log_dirs="~/data", broker_rack="r1", penstock_http_listen="localhost:1")
    assert settings.data_dir == str(Path.home() / "data")
    assert settings.rack == "r1"
    assert settings.http_address == ("localhost", 1)
    assert load_settings({}, {}).rack is None
    assert load_settings({}, {}).http_address is None


def test_settings_load_without_the_heavy_libraries() -> None:
    """A start pays for each import; these belong to other commands, or to a file that was not given."""
    code = (
        "import sys, penstock.broker.config.node_settings as s; s.load_settings({}, {});"
        "heavy = ('typer', 'rich', 'confluent_kafka', 'tomllib', 'difflib', 'asyncio');"
        "print([module for module in heavy if module in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_founders_and_bootstrap_servers_are_read_as_addresses() -> None:
    settings = load_settings(
        {
            "node.id": "2",
            "controller.quorum.voters": "1@a:9092, 2@[::1]:9093",
            "controller.quorum.bootstrap.servers": "c:1,d:2",
            "listeners": "h:9092",
        },
        {},
    )
    assert settings.initial_voters == {1: ("a", 9092), 2: ("::1", 9093)}
    assert settings.bootstrap_servers == (("c", 1), ("d", 2))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"controller.quorum.voters": "a:9092"}, "not ID@HOST:PORT"),
        ({"controller.quorum.voters": "1@a:1,1@b:1"}, "named twice"),
        ({"controller.quorum.voters": "2@a:1,3@b:1"}, "does not name node 1"),
        ({"process.roles": "broker"}, "bootstrap.servers"),
        ({"process.roles": "baker"}, "process.roles"),
        ({"inter.broker.listener.name": "NODES"}, "no listener is named NODES"),
    ],
)
def test_a_place_in_the_cluster_that_cannot_be_is_refused(flags: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidSetting, match=complaint):
        load_settings(flags, {})


VOTERS = "1@a:9093,2@b:9093,3@c:9093"


@pytest.mark.parametrize(
    ("flags", "name", "bound", "advertised"),
    [
        # A node alone has none, unless one is named.
        ({}, None, "", ""),
        ({"listeners": "A://:1,B://:2"}, None, "", ""),
        ({"listeners": "A://h:1,NODES://h:2"}, "NODES", "NODES://h:2", "NODES://h:2"),
        # The address in controller.quorum.voters, where clients use another one.
        (
            {"listeners": "a:9092", "controller.quorum.voters": VOTERS},
            "NODES",
            "NODES://a:9093",
            "NODES://a:9093",
        ),
        (
            {"listeners": ":9092", "controller.quorum.voters": VOTERS},
            "NODES",
            "NODES://:9093",
            "NODES://a:9093",
        ),
        (
            {"listeners": "A://a:9092,B://a:9093", "controller.quorum.voters": VOTERS},
            "B",
            "B://a:9093",
            "B://a:9093",
        ),
        # As told.
        (
            {"listeners": "A://a:9092,B://a:9094", "inter.broker.listener.name": "b"},
            "B",
            "B://a:9094",
            "B://a:9094",
        ),
        # A controller alone has no clients to be kept apart from.
        (
            {"listeners": "a:9093", "controller.quorum.voters": VOTERS, "process.roles": "controller"},
            "PLAINTEXT",
            "PLAINTEXT://a:9093",
            "PLAINTEXT://a:9093",
        ),
    ],
)
def test_nodes_of_a_cluster_have_a_listener_of_their_own(
    flags: dict[str, str], name: str | None, bound: str, advertised: str
) -> None:
    settings = load_settings(flags, {})
    assert settings.inter_broker_listener == name
    assert not settings.is_listener_shared
    assert "".join(str(at) for at in settings.listeners if at.name == name) == bound
    assert "".join(str(at) for at in settings.advertised if at.name == name) == advertised


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"listeners": "a:9093", "controller.quorum.voters": VOTERS}, "which is its listener for clients"),
        ({"listeners": ":9093", "controller.quorum.voters": VOTERS}, "which is its listener for clients"),
        (
            {"listeners": "localhost:1", "controller.quorum.voters": "1@127.0.0.1:1,2@b:1"},
            "which is its listener for clients",
        ),
        (
            {"controller.quorum.bootstrap.servers": "b:9093"},
            "has no listener for the other nodes: add --listen",
        ),
        ({"listeners": "NODES://a:9093"}, "is for other nodes: add one for clients"),
    ],
)
def test_a_listener_is_not_shared_with_clients_by_accident(flags: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidSetting, match=complaint):
        load_settings(flags, {})
    name = "NODES" if "NODES" in flags.get("listeners", "") else "PLAINTEXT"
    assert load_settings({**flags, "inter.broker.listener.name": name}, {}).is_listener_shared


@pytest.mark.parametrize(
    ("name", "value", "flaw"),
    [
        ("group.share.delivery.count.limit", "11", "from group.share.min.delivery.count.limit to"),
        ("group.share.min.delivery.count.limit", "6", "group.share.delivery.count.limit must be from"),
        ("group.consumer.max.heartbeat.interval.ms", "4999", "group.consumer.heartbeat.interval.ms must be"),
    ],
)
def test_a_default_of_groups_lies_within_the_bounds(name: str, value: str, flaw: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(flaw)):
        load_settings({name: value}, {})


def test_a_session_of_groups_outlasts_the_time_between_heartbeats() -> None:
    given = {
        "group.share.min.session.timeout.ms": "1",
        "group.share.session.timeout.ms": "5000",
        "group.share.heartbeat.interval.ms": "5000",
    }
    with pytest.raises(InvalidSetting, match="must be above"):
        load_settings(given, {})
