"""What commands print: tables, facts, errors and exit codes."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import __version__
from penstock.cli import main, output
from penstock.cli.errors import EXIT_USAGE, CommandError, report_error
from penstock.cli.options import parse_pairs
from penstock.cli.os_process import penstock_command
from penstock.cli.output import confirm, human_bytes, plain_number, print_facts, print_table


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_NUM_PARTITIONS", "PENSTOCK_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)


def test_a_piped_table_is_plain_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    print_table(["topic", "records", "rack", "up"], [[name, 5, None, True], ["y", 1000, None, False]])
    assert capsys.readouterr().out.splitlines() == [
        "topic" + " " * 297 + "records  rack  up",
        name + "        5  -     yes",
        "y" + " " * 301 + "   1000  -     no",
    ]


def test_facts_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("id", "abc"), ("members", 0), ("rack", None)])
    assert capsys.readouterr().out.splitlines() == ["id       abc", "members  0", "rack     -"]


def test_sizes_are_readable() -> None:
    assert [human_bytes(count) for count in (None, 0, 1023, 1024, 3 << 30, 5 << 60)] == [
        None,
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
        "5120.0 PiB",
    ]


def test_whole_numbers_have_all_their_digits() -> None:
    assert [plain_number(value) for value in (5e11, 20e6, 12.5, 0.001, 0)] == [
        "500,000,000,000",
        "20,000,000",
        "12.5",
        "0.001",
        "0",
    ]


def test_a_failure_is_a_sentence_and_a_hint_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(CommandError("it broke", hint="mend it")) == 1
    assert capsys.readouterr() == ("", "error: it broke\n       mend it\n")


def test_nothing_is_confirmed_by_a_script_that_did_not_say_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(CommandError, match="needs a confirmation") as caught:
            confirm("sure?", yes=False)
    assert (caught.value.exit_code, caught.value.hint) == (EXIT_USAGE, "add --yes")
    confirm("sure?", yes=True)


def test_pairs_are_refused_without_their_value() -> None:
    assert parse_pairs(["a=b", "c=d=e"], "--config") == {"a": "b", "c": "d=e"}
    with pytest.raises(CommandError, match="--config takes NAME=VALUE, and number 1"):
        parse_pairs(["a"], "--config")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["topic", "--help"], 0),
        (["nonsense"], 2),
        (["topic", "create"], 2),
        (["consume", "t", "--from", "yesterday"], 2),
        (["consume", "t", "--format", "yaml"], 2),
        (["produce", "t", "v", "--format", "yaml"], 2),
        (["produce", "t", "v", "--acks", "2"], 2),
        (["group", "reset", "g"], 2),
        (["group", "reset", "g", "--to-earliest", "--to-latest"], 2),
        (["topic", "alter", "t"], 2),
        (["topic", "list", "--bootstrap", "nonsense"], 2),
        (["topic", "list", "--bootstrap", "localhost:1"], 1),
        (["serve", "--listen", "nonsense"], 2),
        (["serve", "--nonsense"], 2),
        (["config", "--set", "nonsense=1"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert (out if code == 0 else err).strip()


def test_no_broker_names_the_address_and_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "info", "--bootstrap", "localhost:1"]) == 1
    error = capsys.readouterr().err
    assert "no broker at localhost:1: Connection refused" in error
    assert "penstock serve" in error


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_config_shows_what_was_set_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("node.id = 4\n")
    monkeypatch.setenv("PENSTOCK_NUM_PARTITIONS", "6")
    assert main(["config", "--config", str(file), "--http", "localhost:9644"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["setting", "value", "source"],
        ["node.id", "4", "file", str(file)],
        ["num.partitions", "6", "environment", "PENSTOCK_NUM_PARTITIONS"],
        ["penstock.http.listen", "localhost:9644", "flag", "--http"],
    ]


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "num.part", "offsets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "offsets.topic.num.partitions": {
            "value": 50,
            "default": 50,
            "source": "default",
            "source_detail": None,
            "variable": "PENSTOCK_OFFSETS_TOPIC_NUM_PARTITIONS",
            "doc": "Partitions of the topic that holds group offsets.",
        }
    }


def test_config_without_anything_set_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "have their defaults; --all shows them" in err


@pytest.mark.parametrize(
    ("called", "told"),
    [
        ("/opt/penstock/__main__.py", f"{sys.executable} -m penstock"),
        ("/opt/bin/penstock", "/opt/bin/penstock"),
    ],
)
def test_newcomers_are_told_a_command_that_can_be_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, called: str, told: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.chdir(tmp_path)
    assert penstock_command() == told


cells = (
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(0, 9)
    | st.text("ab [/]:$\\*é界\n\t", max_size=6)
)
tables = st.integers(1, 4).flatmap(
    lambda width: st.tuples(
        st.lists(st.text("abc ", min_size=1, max_size=8), min_size=width, max_size=width),
        st.lists(st.lists(cells, min_size=width, max_size=width), max_size=6),
    )
)


@settings(max_examples=300)
@given(tables)
def test_a_table_in_a_pipe_is_the_same_without_rich(
    table: tuple[list[str], list[list[output.Cell]]],
) -> None:
    columns, rows = table
    shown = []
    for plain in (output._plain_lines, lambda *_: None):
        with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as stream:
            patched.setattr(output, "_plain_lines", plain)
            output.print_table(columns, rows)
        shown.append(stream.getvalue())
    assert shown[0] == shown[1]


@pytest.mark.parametrize("words", [("damage",), ("damage", "--verify"), ("accept-loss", "t-0", "--yes")])
def test_a_data_directory_that_does_not_exist_is_named(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("disk", *words, "--data-dir", str(tmp_path / "nowhere"))) == 1
    shown = capsys.readouterr().err
    assert str(tmp_path / "nowhere") in shown
    assert "Errno" not in shown
