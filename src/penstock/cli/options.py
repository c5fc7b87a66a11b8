"""Options that several commands share, and the parsers of their values: NAME=VALUE pairs, offsets and times, and the
targets of `group reset` and `pipeline reset`.
"""

import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from typing import Annotated, NamedTuple

import typer

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.client.retry import UNITS_MS
from penstock.client.wire.metadata import TopicPartition

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap", "-b", metavar="HOST:PORT", envvar="PENSTOCK_BOOTSTRAP", help="A broker of the cluster."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

DEFAULT_BOOTSTRAP = "localhost:9092"


def parse_pairs(texts: Iterable[str], flag: str) -> dict[str, str]:
    """Parses `NAME=VALUE` texts. Raises CommandError."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandError(f"{flag} takes NAME=VALUE, not {text!r}", exit_code=EXIT_USAGE)
        found[name.strip()] = value
    return found


class OffsetSpecKind(Enum):
    BEGINNING = "beginning"
    END = "end"
    OFFSET = "offset"
    LAST = "last"
    TIMESTAMP = "timestamp"


class OffsetSpec(NamedTuple):
    kind: OffsetSpecKind
    value: int = 0  # an offset, a number of records or milliseconds, depending on the kind


def parse_offset_spec(text: str, *, now_ms: int) -> OffsetSpec:
    """Raises ValueError. A plain number is an offset, a negative one counts from the end."""
    text = text.strip()
    match text.lower():
        case "beginning" | "earliest":
            return OffsetSpec(OffsetSpecKind.BEGINNING)
        case "end" | "latest":
            return OffsetSpec(OffsetSpecKind.END)
    if re.fullmatch(r"-\d+", text):
        return OffsetSpec(OffsetSpecKind.LAST, int(text[1:]))
    if re.fullmatch(r"\d+", text):
        return OffsetSpec(OffsetSpecKind.OFFSET, int(text))
    return OffsetSpec(OffsetSpecKind.TIMESTAMP, parse_timestamp(text.removeprefix("@"), now_ms=now_ms))


def parse_timestamp(text: str, *, now_ms: int) -> int:
    """ISO 8601 (local time if it has no zone), milliseconds since 1970, or an age such as 15m. Raises ValueError."""
    text = text.strip()
    if re.fullmatch(r"\d+", text):
        return int(text)
    if age := re.fullmatch(r"(\d+)([smhd])", text):
        return now_ms - int(age[1]) * UNITS_MS[age[2]]
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ValueError(
            f"{text!r} is no point in time: write 2025-01-31T12:00, milliseconds, or an age such as 15m"
        ) from None


def resolve_offset(position: OffsetSpec, *, first: int, end: int, at_timestamp: int | None) -> int:
    """The offset to start at in a partition that holds [first, end); `at_timestamp` is -1 beyond its end."""
    match position.kind:
        case OffsetSpecKind.BEGINNING:
            return first
        case OffsetSpecKind.END:
            return end
        case OffsetSpecKind.OFFSET:
            return min(max(position.value, first), end)
        case OffsetSpecKind.LAST:
            return max(end - position.value, first)
        case OffsetSpecKind.TIMESTAMP:
            assert at_timestamp is not None
            return end if at_timestamp < 0 else at_timestamp


_RESET_WORDS = {"earliest": OffsetSpecKind.BEGINNING, "latest": OffsetSpecKind.END}
_RESET_OPTIONS = "--to, --to-earliest, --to-latest, --to-offset, --to-timestamp or --shift-by"

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


class OffsetShift(NamedTuple):
    """Moves relative to the current offsets of the group."""

    by: int


class PartitionOffsets(NamedTuple):
    """An offset for each partition: -2 is the first record, -1 past the last one. Other partitions do not move."""

    by_partition: Mapping[TopicPartition, int]


ResetTarget = OffsetSpec | OffsetShift | PartitionOffsets


def parse_reset_target(
    to: str | None,
    *,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_timestamp: str | None,
    shift_by: int | None,
    default: ResetTarget | None = None,
) -> ResetTarget:
    """Raises CommandError unless exactly one of them is given, or none if there is a default."""
    found: list[ResetTarget] = []
    if to is not None:
        found.append(_parse_to(to))
    if to_earliest:
        found.append(OffsetSpec(OffsetSpecKind.BEGINNING))
    if to_latest:
        found.append(OffsetSpec(OffsetSpecKind.END))
    if to_offset is not None:
        found.append(OffsetSpec(OffsetSpecKind.OFFSET, to_offset))
    if to_timestamp is not None:
        found.append(_timestamp_spec("--to-timestamp", to_timestamp))
    if shift_by is not None:
        found.append(OffsetShift(shift_by))
    if default is not None and not found:
        return default
    if len(found) != 1:
        raise CommandError("say where to go, in one way", hint=_RESET_OPTIONS, exit_code=EXIT_USAGE)
    return found[0]


def _parse_to(text: str) -> ResetTarget:
    from penstock.client.wire.offsets import EARLIEST  # the raw client takes a moment to load
    from penstock.spark.option_reader import OptionError, numbers_by_partition

    if text.lower() in _RESET_WORDS:
        return OffsetSpec(_RESET_WORDS[text.lower()])
    if not text.lstrip().startswith("{"):
        return _timestamp_spec("--to", text, "; or earliest, or latest")
    try:
        return PartitionOffsets(numbers_by_partition("--to", text, least=EARLIEST))
    except OptionError as error:
        raise CommandError(str(error).removeprefix("option "), exit_code=EXIT_USAGE) from None


def _timestamp_spec(option: str, text: str, others: str = "") -> OffsetSpec:
    try:
        return OffsetSpec(OffsetSpecKind.TIMESTAMP, parse_timestamp(text, now_ms=int(time.time() * 1000)))
    except ValueError as error:
        raise CommandError(f"{option}: {error}{others}", exit_code=EXIT_USAGE) from None
