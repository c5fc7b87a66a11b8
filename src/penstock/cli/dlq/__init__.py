"""`penstock dlq`: look at dead letters, correct them, publish them again, give them up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.dlq_options import (
    Errors,
    Groups,
    Handlers,
    Headers,
    Keys,
    Offsets,
    Partitions,
    Place,
    Since,
    TopicName,
    Until,
    filter_of,
    spot_of,
)
from penstock.cli.failure import Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import note, print_json
from penstock.cli.pipeline import Properties

if TYPE_CHECKING:
    from penstock.client.cluster import Cluster

app = typer.Typer(help="List, show, edit, replay and purge dead letters.", no_args_is_help=True)

TABLE_LETTERS_MAX = 200
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]


@contextmanager
def _opened(bootstrap: str, properties: list[str] | None) -> "Iterator[Cluster]":
    from penstock.cli.dlq_topics import no_letters
    from penstock.cli.raw import open_cluster
    from penstock.client.deadletters.topics import NoLetters
    from penstock.client.deadletters.turns import Overtaken

    with open_cluster(bootstrap, properties) as cluster:
        try:
            yield cluster
        except NoLetters as error:
            raise no_letters(error) from None
        except Overtaken as error:
            raise Failure(str(error), hint="run it again, once they are done") from None


@app.command("list")
def list_letters(
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
            help=f"No more than so many; a table has {TABLE_LETTERS_MAX} unless told otherwise.",
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List the letters of topics or groups; without any, all topics of dead letters with how many they hold."""
    from penstock.cli.dlq_list import print_found, print_topics

    wanted = filter_of(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    with _opened(bootstrap, properties) as cluster:
        if not names:
            print_topics(cluster, wanted, only_waiting=not_replayed, as_json=as_json)
        else:
            most = limit or (None if as_json else TABLE_LETTERS_MAX)
            print_found(cluster, names, wanted, only_waiting=not_replayed, limit=most, as_json=as_json)


@app.command()
def show(
    topic: TopicName,
    place: Place,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    properties: Properties = None,
    as_json: AsJson = False,
) -> None:
    """Show one letter: where it is from, why it is here, its headers and its value."""
    from penstock.cli.dlq_list import find_seen
    from penstock.cli.dlq_topics import chosen_topic
    from penstock.cli.dlq_view import print_document, print_letter

    spot = spot_of(place)
    with _opened(bootstrap, properties) as cluster:
        seen = find_seen(cluster, chosen_topic(cluster, topic), spot)
    if as_json:
        print_document(seen)
    else:
        print_letter(seen)


@app.command()
def edit(
    topic: TopicName,
    place: Place,
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
    """Put a corrected letter in the place of one that was not replayed. `replay` then publishes the corrected one."""
    from penstock.cli.dlq_edit import edit_letter
    from penstock.cli.dlq_topics import chosen_topic

    spot = spot_of(place)
    with _opened(bootstrap, properties) as cluster:
        found = chosen_topic(cluster, topic)
        new = edit_letter(cluster, found, spot, value=value, key=key, headers=headers, editor=editor)
    if as_json:
        told = None if new is None else {"partition": new.partition, "offset": new.offset}
        print_json({"topic": found.name, "edited": str(spot), "letter": told})
    else:
        note(f"{found.name} {spot} is now {new if new is not None else 'the last of its partition'}")


@app.command()
def replay(
    topic: TopicName,
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
    """Publish letters again, each once. Stopped or killed, it goes on when it is run again."""
    from penstock.cli.dlq_replay import destination_of, replay_letters
    from penstock.cli.dlq_topics import chosen_topic

    wanted = filter_of(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    if rate is not None and not 0 < rate < 1e12:
        raise Failure(f"--rate {rate:g}: must be a number of letters per second, above 0", exit_code=2)
    with _opened(bootstrap, properties) as cluster:
        code = replay_letters(
            cluster, chosen_topic(cluster, topic), wanted, destination_of(to, keeps_times=keep_times),
            rate_per_s=rate, limit=limit, dry_run=dry_run, as_json=as_json,
        )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def purge(
    topic: TopicName,
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
    """Give up the letters that filters choose, and delete what is done with.

    A log can only be deleted from its beginning: letters that are done with stay until all before them are, and are
    left out by `replay` meanwhile. Without a filter nothing is given up.
    """
    from penstock.cli.dlq_purge import purge_letters
    from penstock.cli.dlq_topics import chosen_topic

    wanted = filter_of(
        since=since, until=until, errors=errors, keys=keys, headers=headers, groups=groups, handlers=handlers,
        partitions=partitions, offsets=offsets,
    )  # fmt: skip
    with _opened(bootstrap, properties) as cluster:
        found = chosen_topic(cluster, topic)
        purge_letters(
            cluster, found, wanted, everything=everything, dry_run=dry_run, yes=yes, as_json=as_json
        )
