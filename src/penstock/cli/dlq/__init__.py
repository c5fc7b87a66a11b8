"""`penstock dlq`: list, show, edit, replay and purge dead letters.

This module declares the verbs and their options; it imports their implementation when a verb runs.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes, parse_pairs, parse_timestamp
from penstock.cli.output import note, print_json
from penstock.cli.pipeline import Properties

if TYPE_CHECKING:
    from penstock.client.deadletters.dead_letter import DeadLetterFilter, DeadLetterId
    from penstock.client.wire.cluster import Cluster


_OFFSET_RANGE = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")
_TIME_HELP = "2025-01-31T12:00, milliseconds, or an age such as 15m"

TopicArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", help="The topic of the letters, or the one that they are from.", show_default=False
    ),
]
DeadLetterArgument = Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", show_default=False)]
Since = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help=f"Given up at or after: {_TIME_HELP}.")
]
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


def parse_filter(
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
) -> "DeadLetterFilter":
    from penstock.client.deadletters.dead_letter import DeadLetterFilter

    since_ms, until_ms = _parse_time_ms("--since", since), _parse_time_ms("--until", until)
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise CommandError("--since must be before --until", exit_code=EXIT_USAGE)
    return DeadLetterFilter(
        since_ms=since_ms,
        until_ms=until_ms,
        errors=tuple(errors or ()),
        keys=tuple(key.encode() for key in keys or ()),
        headers=tuple(
            (name, value.encode()) for name, value in parse_pairs(headers or (), "--header").items()
        ),
        groups=tuple(groups or ()),
        handlers=tuple(handlers or ()),
        partitions=tuple(partitions or ()),
        offsets=tuple(_parse_offset_range(text) for text in offsets or ()),
    )


def _parse_time_ms(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_timestamp(text.removesuffix("ago"), now_ms=int(time.time() * 1000))
    except ValueError as error:
        raise CommandError(f"{flag}: {error}", exit_code=EXIT_USAGE) from None


def _parse_offset_range(text: str) -> tuple[int, int]:
    found = _OFFSET_RANGE.fullmatch(text)
    first, last = (0, -1) if found is None else (int(found["first"]), int(found["last"] or found["first"]))
    if first > last:
        raise CommandError(f"--offset takes N or N-M, not {text!r}", exit_code=EXIT_USAGE)
    return first, last


def parse_id(text: str) -> "DeadLetterId":
    from penstock.client.deadletters.dead_letter import parse_dead_letter_id

    found = parse_dead_letter_id(text)
    if found is None:
        raise CommandError(
            f"a letter is named by PARTITION:OFFSET, such as 0:42, not {text!r}",
            hint="penstock dlq list shows where they are",
            exit_code=EXIT_USAGE,
        )
    return found


app = typer.Typer(help="List, show, edit, replay and purge dead letters.", no_args_is_help=True)

TABLE_DEAD_LETTERS_MAX = 200
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]


@contextmanager
def _open_cluster(bootstrap: str, properties: list[str] | None) -> "Iterator[Cluster]":
    from penstock.cli.connection import open_cluster
    from penstock.cli.dlq.display import no_dead_letters_error
    from penstock.client.deadletters.topics import NoDeadLetters
    from penstock.client.deadletters.writer import ReplayFenced

    with open_cluster(bootstrap, properties) as cluster:
        try:
            yield cluster
        except NoDeadLetters as error:
            raise no_dead_letters_error(error) from None
        except ReplayFenced as error:
            raise CommandError(str(error), hint="run it again, once they are done") from None


@app.command("list")
def list_dead_letters(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC|GROUP]...",
            help="Topics of letters, topics that they are from, or groups that gave them up.",
            show_default=False,
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    errors: Errors = None,
    keys: Keys = None,
    headers: Headers = None,
    groups: Groups = None,
    handlers: Handlers = None,
    partitions: Partitions = None,
    offsets: Offsets = None,
    not_replayed: Annotated[
        bool, typer.Option("--not-replayed", help="Only those that still wait.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="N", min=1,
            help=f"No more than so many; a table has {TABLE_DEAD_LETTERS_MAX} unless told otherwise.",
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List the dead letters of topics or groups. Without any, list all dead letter topics with their counts."""
    from penstock.cli.dlq.display import print_matching, print_topics

    wanted = parse_filter(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    with _open_cluster(bootstrap, properties) as cluster:
        if not names:
            print_topics(cluster, wanted, only_waiting=not_replayed, as_json=as_json)
        else:
            most = limit or (None if as_json else TABLE_DEAD_LETTERS_MAX)
            print_matching(cluster, names, wanted, only_waiting=not_replayed, limit=most, as_json=as_json)


@app.command()
def show(
    topic: TopicArgument,
    place: DeadLetterArgument,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: its origin, why it failed, its headers and its value."""
    from penstock.cli.dlq.display import (
        find_dead_letter,
        print_dead_letter,
        print_dead_letter_json,
        select_topic,
    )

    dead_letter_id = parse_id(place)
    with _open_cluster(bootstrap, properties) as cluster:
        seen = find_dead_letter(cluster, select_topic(cluster, topic), dead_letter_id)
    if as_json:
        print_dead_letter_json(seen)
    else:
        print_dead_letter(seen)


@app.command()
def edit(
    topic: TopicArgument,
    place: DeadLetterArgument,
    value: Annotated[
        str | None,
        typer.Option("--value", metavar="TEXT|@FILE|-", help="The value; - is standard input.", show_default=False),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", metavar="TEXT", help="The key.")] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header, in place of those of its name."),
    ] = None,
    editor: Annotated[
        bool, typer.Option("--editor", help="Open the value in $EDITOR; the default without other changes.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Replace a dead letter that was not replayed by a corrected one, which `replay` then publishes."""
    from penstock.cli.dlq.display import select_topic
    from penstock.cli.dlq.resolution import edit_dead_letter

    dead_letter_id = parse_id(place)
    with _open_cluster(bootstrap, properties) as cluster:
        found = select_topic(cluster, topic)
        new = edit_dead_letter(
            cluster, found, dead_letter_id, value=value, key=key, headers=headers, editor=editor
        )
    if as_json:
        told = None if new is None else {"partition": new.partition, "offset": new.offset}
        print_json({"topic": found.name, "edited": str(dead_letter_id), "letter": told})
    else:
        note(
            f"{found.name} {dead_letter_id} is now {new if new is not None else 'the last of its partition'}"
        )


@app.command()
def replay(
    topic: TopicArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="original|group|TOPIC",
            help="Where to: the topic that each letter is from, the retries of the group that gave it up, or a topic.",
        ),
    ] = "original",
    since: Since = None,
    until: Until = None,
    errors: Errors = None,
    keys: Keys = None,
    headers: Headers = None,
    groups: Groups = None,
    handlers: Handlers = None,
    partitions: Partitions = None,
    offsets: Offsets = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="No more than so many letters per second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="Stop after so many letters.")
    ] = None,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Records keep the time that they had; else it is now.")
    ] = False,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Publish dead letters again, each once. If it is stopped or killed, run it again to continue."""
    from penstock.cli.dlq.display import select_topic
    from penstock.cli.dlq.resolution import parse_destination, replay_dead_letters

    wanted = parse_filter(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    if rate is not None and not 0 < rate < 1e12:
        raise CommandError(f"--rate {rate:g}: must be a number of letters per second, above 0", exit_code=2)
    with _open_cluster(bootstrap, properties) as cluster:
        code = replay_dead_letters(
            cluster, select_topic(cluster, topic), wanted, parse_destination(to, keeps_times=keep_times),
            rate_per_s=rate, limit=limit, dry_run=dry_run, as_json=as_json,
        )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def purge(
    topic: TopicArgument,
    since: Since = None,
    until: Until = None,
    errors: Errors = None,
    keys: Keys = None,
    headers: Headers = None,
    groups: Groups = None,
    handlers: Handlers = None,
    partitions: Partitions = None,
    offsets: Offsets = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all that is there, replayed or not.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Mark the dead letters that the filters select as purged, and delete resolved ones.

    A log can only be deleted from its beginning: replayed, edited and purged dead letters stay until all before them
    are resolved, too. `replay` skips them meanwhile. Without a filter nothing is marked.
    """
    from penstock.cli.dlq.display import select_topic
    from penstock.cli.dlq.resolution import purge_dead_letters

    wanted = parse_filter(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    with _open_cluster(bootstrap, properties) as cluster:
        found = select_topic(cluster, topic)
        purge_dead_letters(
            cluster, found, wanted, everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
