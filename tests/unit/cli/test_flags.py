"""The flags of `serve`: the fast parser, what it leaves to argparse, and the settings that result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker.config.node_settings import InvalidSetting
from penstock.cli.serve import SERVE_FLAGS, parse_flags, settings_from_flags


def test_the_quick_reader_takes_both_ways_of_writing_a_value() -> None:
    words = ["--listen", "localhost:1", "--listen=B://localhost:2", "--set", "node.id=3", "--welcome"]
    assert parse_flags(words) == {
        "--listen": ["localhost:1", "B://localhost:2"],
        "--set": ["node.id=3"],
        "--welcome": [],
    }
    assert parse_flags([]) == {}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["--lisen", "x"],
        ["--listen"],
        ["--listen", "--welcome"],
        ["extra"],
        ["--welcome=yes"],
    ],
)
def test_the_quick_reader_leaves_help_and_mistakes_to_the_full_one(words: list[str]) -> None:
    assert parse_flags(words) is None


def test_flags_become_settings_and_remember_how_they_were_written() -> None:
    flags = {
        "--listen": ["A://localhost:1", "B://localhost:2"],
        "--data-dir": ["first", "second"],
        "--set": ["num.partitions=7", "node.id=1"],
        "--node-id": ["9"],
    }
    settings = settings_from_flags(flags, {})
    assert [str(listener) for listener in settings.listeners] == ["A://localhost:1", "B://localhost:2"]
    assert settings.data_dir == os.path.abspath("second")
    assert (settings.node_id, settings["num.partitions"]) == (9, 7)
    assert settings.source("node.id") == ("flag", "--node-id")
    assert settings.source("num.partitions") == ("flag", "--set")


def test_the_file_is_named_by_a_flag_or_else_by_a_variable(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("num.partitions = 1")
    two.write_text("num.partitions = 2")
    assert settings_from_flags({}, {"PENSTOCK_CONFIG": str(one)})["num.partitions"] == 1
    assert settings_from_flags({"--config": [str(two)]}, {"PENSTOCK_CONFIG": str(one)})["num.partitions"] == 2


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"--set takes NAME=VALUE, and number 1"):
        settings_from_flags({"--set": ["node.id"]}, {})


def test_every_flag_is_in_the_help_of_serve() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from penstock.cli import main; sys.exit(main())",
        "serve",
        "-h",
    ]
    text = subprocess.check_output(command, text=True, env={**os.environ, "COLUMNS": "160"})
    assert [flag.name for flag in SERVE_FLAGS if flag.name not in text] == []


def test_a_start_does_not_load_the_command_line_library() -> None:
    code = (
        "import sys; from penstock.cli import main; assert main(['serve', '--set', 'node.id=x']) == 2;"
        "print([module for module in ('typer', 'rich', 'confluent_kafka') if module in sys.modules])"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True, stderr=subprocess.DEVNULL) == "[]\n"
    )
