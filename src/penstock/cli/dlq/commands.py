"""The verbs of `penstock dlq` and their options."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import did_you_mean
from penstock.cli.dlq.display import (
    dead_letter_document,
    find_dead_letter,
    print_dead_letter,
    print_matching,
    print_topics,
)
from penstock.cli.dlq.resolution import (
    edit_dead_letter,
    parse_destination,
    purge_dead_letters,
    replay_dead_letters,
)
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options, parse_pairs, parse_timestamp
from penstock.cli.output import note, print_json
from penstock.client.deadletters.dead_letter import DeadLetterFilter, DeadLetterId, parse_dead_letter_id
from penstock.client.deadletters.topics import NoDeadLetters, find_dead_letter_topic
from penstock.client.deadletters.writer import ReplayFenced
from penstock.client.wire.cluster import Cluster

_OFFSET_RANGE = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18}))?")
_TIME_HELP = "2025-01-31T12:00, milliseconds, or an age such as 15m"
TABLE_DEAD_LETTERS_MAX = 200

app = typer.Typer(help="List, show, edit, replay and purge dead letters.", no_args_is_help=True)

TopicArgument = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="The dead letter topic, or the original topic.", show_default=False),
]
DeadLetterArgument = Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """The options that select dead letters. A dead letter must match all options, and one value of each."""

    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help=f"Given up at or after: {_TIME_HELP}.")
    ] = None
    until: Annotated[
        str | None, typer.Option("--until", metavar="WHEN", help="Given up before this time.")
    ] = None
    errors: Annotated[
        list[str] | None,
        typer.Option(
            "--error",
            metavar="CLASS",
            help="With this error class, with or without its module; *Timeout* is a pattern. Repeatable.",
        ),
    ] = None
    keys: Annotated[
        list[str] | None, typer.Option("--key", "-k", metavar="TEXT", help="With this key. Repeatable.")
    ] = None
    headers: Annotated[
        list[str] | None,
        typer.Option(
            "--header", "-H", metavar="NAME=VALUE", help="With this header. Repeatable: all must be present."
        ),
    ] = None
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", "-g", metavar="GROUP", help="Given up by this group. Repeatable."),
    ] = None
    handlers: Annotated[
        list[str] | None,
        typer.Option("--handler", metavar="NAME", help="Given up by this handler of the group. Repeatable."),
    ] = None
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="N", min=0, help="In this partition. Repeatable."),
    ] = None
    offsets: Annotated[
        list[str] | None,
        typer.Option("--offset", "-o", metavar="N[-M]", help="At these offsets. Repeatable."),
    ] = None

    def parse(self) -> DeadLetterFilter:
        """Raises CommandError."""
        since_ms, until_ms = _parse_time_ms("--since", self.since), _parse_time_ms("--until", self.until)
        if since_ms is not None and until_ms is not None and since_ms >= until_ms:
            raise CommandError("--since must be before --until", exit_code=EXIT_USAGE)
        headers = parse_pairs(self.headers or (), "--header")
        return DeadLetterFilter(
            since_ms=since_ms,
            until_ms=until_ms,
            errors=tuple(self.errors or ()),
            keys=tuple(key.encode() for key in self.keys or ()),
            headers=tuple((name, value.encode()) for name, value in headers.items()),
            groups=tuple(self.groups or ()),
            handlers=tuple(self.handlers or ()),
            partitions=tuple(self.partitions or ()),
            offsets=tuple(_parse_offset_range(text) for text in self.offsets or ()),
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


def parse_id(text: str) -> DeadLetterId:
    found = parse_dead_letter_id(text)
    if found is None:
        raise CommandError(
            f"{text!r} does not name a dead letter: write PARTITION:OFFSET, such as 0:42",
            hint="`penstock dlq list TOPIC` shows all dead letters of a topic",
            exit_code=EXIT_USAGE,
        )
    return found


@contextmanager
def _open_cluster(connection: ConnectionOptions) -> Iterator[Cluster]:
    with open_cluster(connection) as cluster:
        try:
            yield cluster
        except NoDeadLetters as error:
            hint = did_you_mean(error.name, error.known, "`penstock dlq list` shows all dead letter topics")
            raise CommandError(str(error), hint=hint) from None
        except ReplayFenced as error:
            raise CommandError(
                str(error), hint="run this command again when the other one has ended"
            ) from None


@app.command("list")
@expand_options
def list_dead_letters(
    options: FilterOptions,
    connection: ConnectionOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC|GROUP",
            help="Dead letter topics, original topics, or groups that gave up.",
            show_default=False,
        ),
    ] = None,
    not_replayed: Annotated[
        bool,
        typer.Option("--not-replayed", help="Only dead letters that are not replayed, edited or purged."),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            metavar="N",
            min=1,
            help=f"Show at most N. Default: {TABLE_DEAD_LETTERS_MAX} in a table, all in JSON.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of topics or groups. Without any, list all dead letter topics with their counts."""

    wanted = options.parse()
    with _open_cluster(connection) as cluster:
        if not names:
            print_topics(cluster, wanted, only_waiting=not_replayed, as_json=as_json)
        else:
            most = limit or (None if as_json else TABLE_DEAD_LETTERS_MAX)
            print_matching(cluster, names, wanted, only_waiting=not_replayed, limit=most, as_json=as_json)


@app.command()
@expand_options
def show(
    topic: TopicArgument, position: DeadLetterArgument, connection: ConnectionOptions, as_json: AsJson = False
) -> None:
    """Show one dead letter: its origin, why it failed, its headers and its value."""

    dead_letter_id = parse_id(position)
    with _open_cluster(connection) as cluster:
        found = find_dead_letter(cluster, find_dead_letter_topic(cluster, topic), dead_letter_id)
    if as_json:
        print_json(dead_letter_document(found, whole=True))
    else:
        print_dead_letter(found)


@app.command()
@expand_options
def edit(
    topic: TopicArgument,
    position: DeadLetterArgument,
    connection: ConnectionOptions,
    value: Annotated[
        str | None,
        typer.Option(
            "--value", metavar="TEXT|@FILE|-", help="The new value; - is standard input.", show_default=False
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", metavar="TEXT", help="The new key.")] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            metavar="NAME=VALUE",
            help="A header, which replaces those with its name. Repeatable.",
        ),
    ] = None,
    editor: Annotated[
        bool, typer.Option("--editor", help="Open the value in $EDITOR. Default without other changes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replace a dead letter that was not replayed by a corrected one, which `replay` then publishes."""

    dead_letter_id = parse_id(position)
    with _open_cluster(connection) as cluster:
        found = find_dead_letter_topic(cluster, topic)
        new = edit_dead_letter(
            cluster, found, dead_letter_id, value=value, key=key, headers=headers, editor=editor
        )
    if as_json:
        corrected = None if new is None else {"partition": new.partition, "offset": new.offset}
        print_json({"topic": found.name, "edited": str(dead_letter_id), "letter": corrected})
    else:
        note(
            f"{found.name} {dead_letter_id} is now {new if new is not None else 'the last of its partition'}"
        )


@app.command()
@expand_options
def replay(
    topic: TopicArgument,
    options: FilterOptions,
    connection: ConnectionOptions,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="original|group|TOPIC",
            help="Publish to the original topic, to the retry topic of the group that gave up, or to this topic.",
        ),
    ] = "original",
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Replay at most N dead letters per second.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="Stop after N dead letters.")
    ] = None,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Keep the timestamps of the records. Default: now.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Publish dead letters again, each once. If it is stopped or killed, run it again to continue."""

    wanted = options.parse()
    if rate is not None and not 0 < rate < 1e12:
        raise CommandError(f"--rate {rate:g}: must be above 0", exit_code=EXIT_USAGE)
    with _open_cluster(connection) as cluster:
        code = replay_dead_letters(
            cluster,
            find_dead_letter_topic(cluster, topic),
            wanted,
            parse_destination(to, keeps_times=keep_times),
            rate_per_s=rate,
            limit=limit,
            dry_run=dry_run,
            as_json=as_json,
        )
    raise typer.Exit(code)


@app.command()
@expand_options
def purge(
    topic: TopicArgument,
    options: FilterOptions,
    connection: ConnectionOptions,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all dead letters of the topic, replayed or not.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Mark the dead letters that the filters select as purged, and delete resolved ones.

    Without a filter no dead letter is marked. A log can only be deleted from its beginning: replayed, edited and
    purged dead letters stay until all dead letters before them are resolved, too. `replay` skips them meanwhile.
    """

    wanted = options.parse()
    with _open_cluster(connection) as cluster:
        found = find_dead_letter_topic(cluster, topic)
        purge_dead_letters(
            cluster, found, wanted, everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
