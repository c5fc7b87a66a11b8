"""`penstock transaction`: list and describe transactions, abort one, and find and abort hanging ones."""

import time
from typing import Annotated, Any

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import PartitionName
from penstock.cli.errors import CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table
from penstock.client.admin.transactions import (
    OpenProducer,
    TransactionDescription,
    find_transaction,
    list_open_producers,
    list_transaction_descriptions,
    write_abort_marker,
)
from penstock.client.errors import Refused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.transactions import fence_producer
from penstock.protocol.errors import ErrorCode

#: The default maximum of transaction timeouts: a transaction that no coordinator knows after that time is really lost.
_HANGING_AFTER_S = 900.0
#: The prefix of the transactional ids of Spark sinks.
_SINK_ID_PREFIX = "penstock-sink-"

app = typer.Typer(help="List, describe and abort transactions.", no_args_is_help=True)

TransactionalId = Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID", show_default=False)]


@app.command("list")
@expand_options
def list_transactions(
    connection: ConnectionOptions,
    only_open: Annotated[bool, typer.Option("--open", help="Only open transactions.")] = False,
    as_json: AsJson = False,
) -> None:
    """List transactional ids with the state of their transactions, longest open first."""
    with open_cluster(connection) as cluster:
        found = _documents(cluster, list_transaction_descriptions(cluster))
    rows = sorted(found, key=lambda row: -(row["open_s"] or 0.0))
    if only_open:
        rows = [row for row in rows if row["open_s"] is not None]
    if as_json:
        print_json(rows)
    elif rows:
        cells = (
            [*list(row.values())[:-1], ", ".join(sorted({part["topic"] for part in row["partitions"]}))]
            for row in rows
        )
        print_table([column.replace("_", " ") for column in rows[0]], cells)
    else:
        note("no open transactions" if only_open else "no transactional ids yet")


@app.command()
@expand_options
def describe(name: TransactionalId, connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show the state of a transactional id, and the partitions in its open transaction."""
    with open_cluster(connection) as cluster:
        document = _find_document(cluster, name)
    if as_json:
        print_json(document)
        return
    partitions = document.pop("partitions")
    print_facts([(key.replace("_", " "), value) for key, value in document.items()])
    if partitions:
        print()
        print_table(list(partitions[0]), (list(each.values()) for each in partitions))


def _find_document(cluster: Cluster, name: str) -> dict[str, Any]:
    found = find_transaction(cluster, name)
    if found is None:
        raise CommandError(
            f"transactional id {name} does not exist", hint="`penstock transaction list` shows all ids"
        )
    return _documents(cluster, [found])[0]


def _documents(cluster: Cluster, found: list[TransactionDescription]) -> list[dict[str, Any]]:
    rows = [_transaction_document(each) for each in found]
    if any(str(row["transactional_id"]).startswith(_SINK_ID_PREFIX) for row in rows):
        # Loads much that other commands do not need.
        from penstock.spark.internal_topics import DocumentStore
        from penstock.spark.pipelines.open_transactions import transaction_owner
        from penstock.spark.pipelines.status import read_statuses

        pipelines = read_statuses(DocumentStore(cluster))
        for row in rows:
            row["owner"] = transaction_owner(row["transactional_id"], pipelines)
    return rows


def _transaction_document(found: TransactionDescription) -> dict[str, Any]:
    open_s = None if found.start_ms is None else round(max(time.time() - found.start_ms / 1000, 0.0), 1)
    return {
        "transactional_id": found.transactional_id,
        "state": found.state,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "timeout_ms": found.timeout_ms,
        "open_s": None if found.state.startswith(("Complete", "Empty")) else open_s,
        "owner": None,
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in found.partitions],
    }


@app.command()
@expand_options
def abort(name: TransactionalId, connection: ConnectionOptions, yes: Yes = False) -> None:
    """Abort the open transaction of a transactional id, and fence its producer.

    A producer that is still alive cannot continue with it, and has to be created again. A transaction that is
    already being committed is not aborted: the command waits for the commit.
    """
    with open_cluster(connection) as cluster:
        row = _find_document(cluster, name)
        if row["owner"] is not None and row["open_s"] is not None:
            # The owner may have decided to commit: then an abort would lose rows.
            from penstock.cli.pipeline.status import remedy_text  # loads much that other commands do not need

            raise CommandError(
                f"{name} belongs to {row['owner']}, which may have decided to commit it",
                hint=remedy_text(row),
            )
        confirm(f"Abort the transaction of {name} ({row['state']}) and fence its producer?", yes=yes)
        fence_producer(cluster, name)
    note(f"{name}: no transaction is open, and the producer is fenced")


@app.command()
@expand_options
def hanging(
    connection: ConnectionOptions,
    silent_s: Annotated[
        float,
        typer.Option(
            "--silent",
            metavar="SECONDS",
            min=0,
            help="Only if the producer has written nothing for this long.",
        ),
    ] = _HANGING_AFTER_S,
    abort_them: Annotated[bool, typer.Option("--abort", help="Write abort markers for all of them.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Find transactions that are open in a partition but unknown to all coordinators, so that nothing ends them."""
    with open_cluster(connection) as cluster:
        found = _find_hanging(cluster, silent_s)
        rows = [_hanging_document(each) for each in found]
        if as_json and not abort_them:
            print_json(rows)
        elif rows and not as_json:
            print_table(
                [column.replace("_", " ") for column in rows[0]], (list(row.values()) for row in rows)
            )
        elif not rows:
            note("no hanging transactions; `penstock transaction list --open` shows all open ones")
        if not (abort_them and found):
            return
        confirm(f"Abort {plural(len(found), 'hanging transaction')}?", yes=yes)
        for each in found:
            try:
                write_abort_marker(cluster, each)
            except Refused as error:
                if error.code is not ErrorCode.cluster_authorization_failed:
                    raise
                raise CommandError(
                    f"{PartitionName(each.topic, each.partition)}: the broker accepts markers only on its listener "
                    "for nodes",
                    hint="give --bootstrap the address of that listener, which is named NODES in the node's settings",
                ) from None
    if as_json:
        print_json([{**row, "aborted": True} for row in rows])
    else:
        note(f"{plural(len(found), 'hanging transaction')} aborted")


def _find_hanging(cluster: Cluster, silent_s: float) -> list[OpenProducer]:
    """Transactions that no coordinator knows, open both before and after the request to the coordinators."""
    latest_ms = (time.time() - silent_s) * 1000
    before = [each for each in list_open_producers(cluster) if each.last_ms <= latest_ms]
    if not before:
        return []
    known = {
        (each.producer_id, partition)
        for each in list_transaction_descriptions(cluster)
        for partition in each.partitions
    }
    suspects = {
        _identity(each) for each in before if (each.producer_id, (each.topic, each.partition)) not in known
    }
    if not suspects:
        return []
    return [each for each in list_open_producers(cluster) if _identity(each) in suspects]


def _identity(found: OpenProducer) -> tuple[object, ...]:
    return found.topic, found.partition, found.producer_id, found.start_offset


def _hanging_document(found: OpenProducer) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "partition": found.partition,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "start_offset": found.start_offset,
        "silent_s": round(max(time.time() - found.last_ms / 1000, 0.0), 1),
    }
