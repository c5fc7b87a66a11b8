"""Arguments and output of `penstock dlq`, without a broker."""

import json

import pytest

from penstock.cli import main
from penstock.cli.dlq.commands import FilterOptions, parse_id
from penstock.cli.dlq.display import (
    DeadLetterStatus,
    dead_letter_document,
    print_dead_letter,
    print_dead_letters,
    print_json_lines,
    short_text,
    value_lines,
)
from penstock.cli.dlq.resolution import json_separators
from penstock.cli.errors import CommandError
from penstock.client.deadletters.dead_letter import DeadLetter
from penstock.protocol.dead_letter_headers import ERROR_MESSAGE_HEADER, ERROR_STACK_HEADER, GROUP_HEADER
from penstock.protocol.record_batch import Record


def test_flags_make_a_filter():
    found = FilterOptions(
        since="1000", until="2001-01-01T00:00:00+00:00", keys=["ä"], headers=["a=b=c"]
    ).parse()
    assert (found.since_ms, found.until_ms) == (1000, 978_307_200_000)
    assert (found.keys, found.headers) == (("ä".encode(),), (("a", b"b=c"),))
    assert FilterOptions(offsets=["7", "10-20"]).parse().offsets == ((7, 7), (10, 20))
    assert FilterOptions().parse().is_empty
    age = FilterOptions(since="2h ago").parse().since_ms - FilterOptions(since="2h").parse().since_ms
    assert abs(age) < 10_000


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"since": "yesterday"}, "--since: .* not a time"),
        ({"since": "2000", "until": "1000"}, "--since must be before --until"),
        ({"offsets": ["9-3"]}, "--offset takes N or N-M, not '9-3'"),
        ({"offsets": ["x"]}, "--offset takes"),
        ({"headers": ["novalue"]}, "--header takes NAME=VALUE"),
    ],
)
def test_what_is_wrong_with_flags_is_a_sentence(given, complaint):
    with pytest.raises(CommandError, match=complaint) as caught:
        FilterOptions(**given).parse()
    assert caught.value.exit_code == 2


def test_a_letter_is_named_by_its_place():
    assert parse_id("0:42") == (0, 42)
    with pytest.raises(CommandError, match="PARTITION:OFFSET"):
        parse_id("42")


def test_values_are_shown_as_what_they_are():
    assert value_lines(b'{"b":[1,2]}') == ["{", '  "b": [', "    1,", "    2", "  ]", "}"]
    assert value_lines("zwölf\nx".encode()) == ["zwölf", "x"]
    assert value_lines(None) == ["(no value)"]
    assert value_lines(b"") == ["(empty)"]
    assert value_lines(b"\x00\x1b[2Jabc") == [
        "00000000  00 1b 5b 32 4a 61 62 63                          ..[2Jabc"
    ]
    assert value_lines(bytes(17))[1].startswith("00000010  00 ")
    assert [short_text(each) for each in (None, b"k1", b"\xff\x00", b"a\nb")] == [
        None,
        "k1",
        "0xff00",
        "0x610a62",
    ]


def test_nothing_that_a_letter_says_gets_at_the_terminal(capsys):
    """Names, texts and times may be arbitrary."""
    headers = (
        (GROUP_HEADER, b"g\x1b[2J"),
        (ERROR_MESSAGE_HEADER, b"\x07bell\nmore"),
        (ERROR_STACK_HEADER, b"\x1b]0;x"),
        ("a\udcff", b"1"),
    )
    for timestamp in (-1, 1 << 62):
        seen = DeadLetterStatus(DeadLetter("t.dlq", 0, Record(0, timestamp, b"\x1b", b"\x1b", headers)), None)
        print_dead_letter(seen)
        print_dead_letters([seen], limit=5, with_topic=True)
        print_json_lines([seen])
        print(json.dumps(dead_letter_document(seen, whole=True), ensure_ascii=False))
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "g?[2J" in told
    told.encode()


def test_json_that_would_not_come_out_the_same_is_left_as_it_is():
    assert json_separators('{"a":1.5,"b":[true]}') == (",", ":")
    assert json_separators('{"a": "ü"}') == (", ", ": ")
    for text in ('{"a":1.10}', '{"a":1,"a":2}', '{ "a":1}', '{"a":1}\n', "plain", ""):
        assert json_separators(text) is None
    assert json.loads('{"a":1.10}') == {"a": 1.1}


def test_help_names_all_verbs_and_a_rate_of_nothing_is_refused(capfd):
    assert main(["dlq", "--help"]) == 0
    told = capfd.readouterr().out
    assert all(verb in told for verb in ("list", "show", "edit", "replay", "purge"))
    assert main(["dlq", "replay", "orders.dlq", "--rate", "0"]) == 2
    assert "--rate 0: must be above 0" in capfd.readouterr().err
