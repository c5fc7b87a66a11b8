"""Where `penstock group reset` and `penstock pipeline reset` move to: the same words for both."""

import time
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import typer

from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.positions import Anchor, Position, parse_timestamp
from penstock.client.metadata import Place

_WORDS = {"earliest": Anchor.BEGINNING, "latest": Anchor.END}
_WAYS = "--to, --to-earliest, --to-latest, --to-offset, --to-timestamp or --shift-by"

To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="WHERE",
        help='earliest, latest, a time (ISO 8601, milliseconds, or an age such as 15m), or {"topic": {"0": 23}}.',
        show_default=False,
    ),
]
ToEarliest = Annotated[bool, typer.Option("--to-earliest", help="To the first record.")]
ToLatest = Annotated[bool, typer.Option("--to-latest", help="Past the last record.")]
ToOffset = Annotated[int | None, typer.Option("--to-offset", metavar="OFFSET", min=0, help="To this offset.")]
ToTimestamp = Annotated[
    str | None,
    typer.Option("--to-timestamp", metavar="TIME", help="ISO 8601, milliseconds, or an age such as 15m."),
]
ShiftBy = Annotated[
    int | None, typer.Option("--shift-by", metavar="N", help="On or back by so many records.")
]
OnlyTopics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic", "-t", metavar="TOPIC[:PARTITION]", help="Only this; all that it has if not given."
    ),
]


class Shift(NamedTuple):
    """From where the group is."""

    by: int


class Offsets(NamedTuple):
    """By partition; -2 is the first record, -1 past the last one. Partitions that are not named stay where they are."""

    by_place: Mapping[Place, int]


Target = Position | Shift | Offsets


def parse_target(
    to: str | None,
    *,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_timestamp: str | None,
    shift_by: int | None,
    default: Target | None = None,
) -> Target:
    """Raises Failure unless exactly one of them is given, or none where there is a default."""
    found: list[Target] = []
    if to is not None:
        found.append(_parse(to))
    if to_earliest:
        found.append(Position(Anchor.BEGINNING))
    if to_latest:
        found.append(Position(Anchor.END))
    if to_offset is not None:
        found.append(Position(Anchor.OFFSET, to_offset))
    if to_timestamp is not None:
        found.append(_at_time("--to-timestamp", to_timestamp))
    if shift_by is not None:
        found.append(Shift(shift_by))
    if default is not None and not found:
        return default
    if len(found) != 1:
        raise Failure("say where to go, in one way", hint=_WAYS, exit_code=WRONG_USAGE)
    return found[0]


def _parse(text: str) -> Target:
    from penstock.client.positions import EARLIEST  # the raw client takes a moment to load
    from penstock.spark.option_values import OptionError, numbers_by_place

    if text.lower() in _WORDS:
        return Position(_WORDS[text.lower()])
    if not text.lstrip().startswith("{"):
        return _at_time("--to", text, "; or earliest, or latest")
    try:
        return Offsets(numbers_by_place("--to", text, least=EARLIEST))
    except OptionError as error:
        raise Failure(str(error).removeprefix("option "), exit_code=WRONG_USAGE) from None


def _at_time(option: str, text: str, others: str = "") -> Position:
    try:
        return Position(Anchor.TIMESTAMP, parse_timestamp(text, now_ms=int(time.time() * 1000)))
    except ValueError as error:
        raise Failure(f"{option}: {error}{others}", exit_code=WRONG_USAGE) from None
