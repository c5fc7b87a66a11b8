"""Options that several commands share, and the parsers of their values: NAME=VALUE pairs, offsets and times, and the
targets of `group reset` and `pipeline reset`.

A block of options that several commands have is a dataclass whose fields are the options. A command takes it as one
parameter, and `expand_options` shows the fields to typer as the command's own options.
"""

import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.client.retry import UNITS_MS

TopicPartition = tuple[str, int]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DeletedConfigs = Annotated[
    list[str] | None,
    typer.Option("--delete-config", "-d", metavar="NAME", help="Reset a setting to its default. Repeatable."),
]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh every 2 seconds.")]


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces parameters whose type is a dataclass of options by its fields, after the command's own options."""
    parameters = inspect.signature(command).parameters.values()
    blocks: dict[str, Any] = {
        each.name: each.annotation for each in parameters if is_dataclass(each.annotation)
    }
    own = [each for each in parameters if each.name not in blocks]
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for block in blocks.values()
        for field in fields(block)
    ]

    def run(**given: Any) -> None:
        for name, block in blocks.items():
            given[name] = block(**{field.name: given.pop(field.name) for field in fields(block)})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return with_parameters(run, [*own, *shared])


def with_parameters(run: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Lets typer see these parameters in place of those of `run`."""
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__annotations__ = {each.name: each.annotation for each in keyword_only}
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run


def parse_pairs(texts: Iterable[str], flag: str) -> dict[str, str]:
    """Parses `NAME=VALUE` texts. Raises CommandError, which shows no text: it may be a password."""
    found = {}
    for number, text in enumerate(texts, start=1):
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandError(
                f"{flag} takes NAME=VALUE, and number {number} is not of this form", exit_code=EXIT_USAGE
            )
        found[name.strip()] = value
    return found


_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([kmgtp]?)(i?)(?:b)?(?:/s)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(name: str, text: str, *, what: str, example: str) -> int:
    """Parses `500GB`, `20MB/s` or `1.5GiB`; KB is 1000 bytes and KiB 1024. Raises CommandError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise CommandError(f"{name}: {text!r} is no {what}", hint=example, exit_code=EXIT_USAGE)
    number, unit, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** _POWERS[unit.lower()]
    return int(number) * factor if number.isdigit() else round(float(number) * factor)


def config_changes(
    config: Iterable[str] | None, delete_config: Iterable[str] | None
) -> dict[str, str | None]:
    """The changes that --config and --delete-config ask for; None resets a setting. Raises CommandError."""
    return {**parse_pairs(config or (), "--config"), **dict.fromkeys(delete_config or ())}


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


_TIMESTAMP_MS_MAX = 2**63 - 1


def parse_timestamp(text: str, *, now_ms: int) -> int:
    """ISO 8601 (local time if it has no zone), milliseconds since 1970, or an age such as 15m. Raises ValueError.

    What is before 1970, or too large for a request, is the earliest or the latest time that a request can have:
    negative timestamps have meanings of their own.
    """
    return min(max(_timestamp(text.strip(), now_ms), 0), _TIMESTAMP_MS_MAX)


def _timestamp(text: str, now_ms: int) -> int:
    if re.fullmatch(r"\d+", text):
        return int(text)
    if age := re.fullmatch(r"(\d+)([smhd])", text):
        return now_ms - int(age[1]) * UNITS_MS[age[2]]
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time: write 2025-01-31T12:00, milliseconds, or an age such as 15m"
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
_TIME_FORMS = "ISO 8601, milliseconds, or an age such as 15m"


class OffsetShift(NamedTuple):
    """Moves relative to the current offsets of the group."""

    by: int


class PartitionOffsets(NamedTuple):
    """An offset for each partition: -2 is the first record, -1 the end. Other partitions do not move."""

    by_partition: Mapping[TopicPartition, int]


ResetTarget = OffsetSpec | OffsetShift | PartitionOffsets


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetOptions:
    """The options of `group reset` and `pipeline reset`."""

    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            "-t",
            metavar="TOPIC[:PARTITION]",
            help="Move only this topic or partition. Repeatable. Default: all that were read.",
        ),
    ] = None
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="WHERE",
            help=f'earliest, latest, a time ({_TIME_FORMS}), or {{"topic": {{"0": 23}}}}.',
            show_default=False,
        ),
    ] = None
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end, after the last record.")] = False
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", metavar="OFFSET", min=0, help="To this offset.")
    ] = None
    to_timestamp: Annotated[
        str | None,
        typer.Option(
            "--to-timestamp", metavar="TIME", help=f"To the first record of this time on: {_TIME_FORMS}."
        ),
    ] = None
    shift_by: Annotated[
        int | None,
        typer.Option("--shift-by", metavar="N", help="Forward by N records, or back if N is negative."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False
    yes: Yes = False

    def target(self, default: ResetTarget | None = None) -> ResetTarget:
        """Raises CommandError unless exactly one target is given, or none if there is a default."""
        found: list[ResetTarget] = []
        if self.to is not None:
            found.append(_parse_to(self.to))
        if self.to_earliest:
            found.append(OffsetSpec(OffsetSpecKind.BEGINNING))
        if self.to_latest:
            found.append(OffsetSpec(OffsetSpecKind.END))
        if self.to_offset is not None:
            found.append(OffsetSpec(OffsetSpecKind.OFFSET, self.to_offset))
        if self.to_timestamp is not None:
            found.append(_timestamp_spec("--to-timestamp", self.to_timestamp))
        if self.shift_by is not None:
            found.append(OffsetShift(self.shift_by))
        if default is not None and not found:
            return default
        if len(found) != 1:
            raise CommandError(
                "a reset needs exactly one target" if not found else "a reset takes only one target",
                hint="give one of --to, --to-earliest, --to-latest, --to-offset, --to-timestamp and --shift-by",
                exit_code=EXIT_USAGE,
            )
        return found[0]


def _parse_to(text: str) -> ResetTarget:
    # Only this form of the option needs them, and the client takes a moment to load.
    from penstock.client.wire.offsets import EARLIEST
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
