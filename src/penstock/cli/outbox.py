"""`penstock outbox`: relay the outbox rows of a database to topics, and retry or discard the rows that brokers
reject.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.connection import ConnectionOptions
from penstock.cli.connection.librdkafka import librdkafka_connection
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.os_process import stop_on_first_signal
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_rows, print_table
from penstock.client.outbox.database import (
    OutboxDatabase,
    RejectedRow,
    create_tables,
    open_database,
    url_dialect,
)
from penstock.client.outbox.messages import OutboxError, RelayInterrupted, schema

app = typer.Typer(
    help="Relay messages from a database to topics: the transactional outbox.", no_args_is_help=True
)

DATABASE_VARIABLE = "PENSTOCK_OUTBOX_DATABASE"
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database",
        "-d",
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        show_default=False,
        help="sqlite:///shop.db or postgresql://user@host/database. In the variable, a password in it is not "
        "visible to other users.",
    ),
]
RowIds = Annotated[list[int] | None, typer.Argument(metavar="ID", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All rejected rows.")]
_ALL_SHARDS = "all"


@app.command()
def init(
    database: DatabaseUrl,
    print_sql: Annotated[
        bool, typer.Option("--print", help="Print the SQL, for a migration, and change nothing.")
    ] = False,
) -> None:
    """Create the tables of an outbox if they are missing."""
    with _errors_as_sentences():
        if print_sql:
            print(";\n".join(schema(url_dialect(database))) + ";")
            return
        create_tables(database)
    note("the outbox has its tables")


@app.command()
@expand_options
def relay(
    database: DatabaseUrl,
    connection: ConnectionOptions,
    name: Annotated[
        str, typer.Option(help="Name of this outbox; no other database may use it in this cluster.")
    ] = "outbox",
    shards: Annotated[
        int, typer.Option(metavar="N", help="Number of shards that the rows are divided into.")
    ] = 1,
    shard: Annotated[str, typer.Option(metavar="I|all", help="The shard to relay, from 0 on.")] = _ALL_SHARDS,
    batch: Annotated[int, typer.Option(metavar="N", help="Maximum rows of one transaction.")] = 500,
    on_reject: Annotated[
        str,
        typer.Option(
            metavar="hold|skip|stop",
            help="After a row that brokers reject: hold later rows with its key, skip the row, or stop the relay.",
        ),
    ] = "hold",
    once: Annotated[bool, typer.Option("--once", help="End when no row is left.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Continue although another database used this name.")
    ] = False,
) -> None:
    """Relay rows to their topics until Ctrl-C or SIGTERM, each row once and in order within its key.

    A second relay for the same rows waits, and takes over when the first is gone.
    """
    from penstock.client.outbox.relay import (  # the other verbs need no Kafka client
        OnReject,
        Relay,
        run_relays,
    )

    if on_reject not in list(OnReject):
        raise CommandError(
            f"--on-reject takes {', '.join(OnReject)}, not {on_reject!r}", exit_code=EXIT_USAGE
        )
    settings = librdkafka_connection(connection)
    _silence_librdkafka()
    with _errors_as_sentences(), stop_on_first_signal() as stopping:
        open_database(database).close()
        relays = [
            Relay(
                database,
                connection.addresses,
                name=name,
                shards=shards,
                shard=each,
                batch_rows=batch,
                on_reject=on_reject,
                take_over=take_over,
                settings=settings,
                say=note,
            )
            for each in _selected_shards(shard, shards)
        ]
        run_relays(relays, stopping, once=once)
    relayed, rejected = (
        sum(getattr(each.counts, what) for each in relays) for what in ("relayed", "rejected")
    )
    note(f"{plural(relayed, 'row')} relayed" + (f", {plural(rejected, 'row')} rejected" if rejected else ""))


@app.command()
def status(
    database: DatabaseUrl,
    shards: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default=False, help="Number of shards, if no relay has run yet."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many rows are waiting, for how long, and how many were rejected."""
    with _open_outbox(database) as opened:
        agreed = opened.agreement()
        found = opened.status(shards or (agreed.shards if agreed else 1))
    rows: list[dict[str, Any]] = [
        {
            "shard": each.shard,
            "waiting": each.waiting,
            "oldest_s": None if each.oldest_s is None else round(max(each.oldest_s, 0.0), 1),
            "held": each.held,
            "rejected": each.rejected,
            "relayed": each.is_relayed,
        }
        for each in found
    ]
    if as_json:
        print_json({"name": agreed.name if agreed else None, "shards": rows})
        return
    print_facts([("name", agreed.name if agreed else None), ("shards", len(rows))])
    print()
    print_table([column.replace("_", " ") for column in rows[0]], (list(row.values()) for row in rows))


@app.command()
def rejected(database: DatabaseUrl, as_json: AsJson = False) -> None:
    """List the rows that brokers rejected, and why."""
    with _open_outbox(database) as opened:
        rows = [_rejected_document(each) for each in opened.rejected()]
    print_rows(rows, as_json=as_json, if_none="no rejected rows")


@app.command()
def retry(database: DatabaseUrl, ids: RowIds = None, every: All = False) -> None:
    """Put rejected rows back to be relayed, ahead of rows that were written after them."""
    with _open_outbox(database) as opened:
        count = opened.retry(_selected_ids(opened, ids, every))
    note(f"{plural(count, 'row')} put back")


@app.command()
def discard(database: DatabaseUrl, ids: RowIds = None, every: All = False, yes: Yes = False) -> None:
    """Discard rejected rows: they are never published, and rows that wait behind them are relayed."""
    with _open_outbox(database) as opened:
        selected = _selected_ids(opened, ids, every)
        confirm(f"Discard {plural(len(selected), 'message')}? They are never published.", yes=yes)
        count = opened.discard(selected)
    note(f"{plural(count, 'row')} discarded")


def _selected_ids(database: OutboxDatabase, ids: list[int] | None, every: bool) -> list[int]:
    rejected_ids = [each.id for each in database.rejected()]
    if every:
        if not rejected_ids:
            raise CommandError("no row is rejected")
        return rejected_ids
    if not ids:
        raise CommandError("no rows are named", hint="give their ids, or --all", exit_code=EXIT_USAGE)
    if missing := sorted(set(ids) - set(rejected_ids)):
        raise CommandError(
            f"row {missing[0]} is not rejected", hint="`penstock outbox rejected` shows rejected rows"
        )
    return ids


def _rejected_document(found: RejectedRow) -> dict[str, Any]:
    return {
        "id": found.id,
        "topic": found.topic,
        "key": None if found.key is None else found.key.decode(errors="replace"),
        "message_id": found.message_id,
        "age_s": round(max(found.age_s, 0.0), 1),
        "reason": found.reason,
    }


def _selected_shards(shard: str, shards: int) -> range:
    if shard == _ALL_SHARDS:
        return range(max(shards, 1))  # at least one, so that Relay reports an invalid --shards
    if not shard.isdecimal():
        raise CommandError(f"--shard takes a number or all, not {shard!r}", exit_code=EXIT_USAGE)
    return range(int(shard), int(shard) + 1)


@contextlib.contextmanager
def _open_outbox(url: str) -> Iterator[OutboxDatabase]:
    with _errors_as_sentences(), contextlib.closing(open_database(url)) as opened:
        yield opened


@contextlib.contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except (OutboxError, RelayInterrupted) as error:
        raise CommandError(str(error)) from None


def _silence_librdkafka() -> None:
    """The client library's errors are reported as sentences instead."""
    logger = logging.getLogger("penstock.client.librdkafka")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
