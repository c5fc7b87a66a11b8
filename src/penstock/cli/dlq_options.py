"""Which letters a command means: the flags of `penstock dlq`, and the filter that they make."""

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import pairs
from penstock.cli.positions import parse_timestamp

if TYPE_CHECKING:
    from penstock.client.deadletters.filters import Filter
    from penstock.client.deadletters.letter import Spot

_OFFSETS = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")
_WHEN = "2025-01-31T12:00, milliseconds, or an age such as 15m"

TopicName = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", help="The topic of the letters, or the one that they are from.", show_default=False
    ),
]
Place = Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", show_default=False)]
Since = Annotated[str | None, typer.Option("--since", metavar="WHEN", help=f"Given up at or after: {_WHEN}.")]
Until = Annotated[str | None, typer.Option("--until", metavar="WHEN", help="Given up before.")]
Errors = Annotated[
    list[str] | None,
    typer.Option(
        "--error", metavar="CLASS", help="With or without its module; *Timeout* is a pattern. Repeatable."
    ),
]
Keys = Annotated[
    list[str] | None, typer.Option("--key", "-k", metavar="TEXT", help="Of this key. Repeatable.")
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="With this header. Repeatable: with all."),
]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", "-g", metavar="GROUP", help="Given up by this group. Repeatable."),
]
Handlers = Annotated[
    list[str] | None,
    typer.Option("--handler", metavar="NAME", help="Given up by this function of the group. Repeatable."),
]
Partitions = Annotated[
    list[int] | None, typer.Option("--partition", "-p", metavar="N", min=0, help="Lying here. Repeatable.")
]
Offsets = Annotated[
    list[str] | None, typer.Option("--offset", "-o", metavar="N[-M]", help="Lying there. Repeatable.")
]


def filter_of(
    *,
    since: str | None,
    until: str | None,
    errors: Sequence[str] | None,
    keys: Sequence[str] | None,
    headers: Sequence[str] | None,
    groups: Sequence[str] | None,
    handlers: Sequence[str] | None,
    partitions: Sequence[int] | None,
    offsets: Sequence[str] | None,
) -> "Filter":
    from penstock.client.deadletters.filters import Filter

    since_ms, until_ms = _moment_ms("--since", since), _moment_ms("--until", until)
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise Failure("--since must be before --until", exit_code=WRONG_USAGE)
    return Filter(
        since_ms=since_ms,
        until_ms=until_ms,
        errors=tuple(errors or ()),
        keys=tuple(key.encode() for key in keys or ()),
        headers=tuple((name, value.encode()) for name, value in pairs(headers or (), "--header").items()),
        groups=tuple(groups or ()),
        handlers=tuple(handlers or ()),
        partitions=tuple(partitions or ()),
        offsets=tuple(_offsets(text) for text in offsets or ()),
    )


def _moment_ms(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_timestamp(text.removesuffix("ago"), now_ms=int(time.time() * 1000))
    except ValueError as error:
        raise Failure(f"{flag}: {error}", exit_code=WRONG_USAGE) from None


def _offsets(text: str) -> tuple[int, int]:
    found = _OFFSETS.fullmatch(text)
    first, last = (0, -1) if found is None else (int(found["first"]), int(found["last"] or found["first"]))
    if first > last:
        raise Failure(f"--offset takes N or N-M, not {text!r}", exit_code=WRONG_USAGE)
    return first, last


def spot_of(text: str) -> "Spot":
    from penstock.client.deadletters.letter import parse_spot

    found = parse_spot(text)
    if found is None:
        raise Failure(
            f"a letter is named by PARTITION:OFFSET, such as 0:42, not {text!r}",
            hint="penstock dlq list shows where they are",
            exit_code=WRONG_USAGE,
        )
    return found
