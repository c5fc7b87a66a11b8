"""`penstock transaction`: see transactions, and end those that nobody else will."""

import time
from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster
from penstock.cli.failure import Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table
from penstock.cli.transaction_requests import (
    OpenProducer,
    Transaction,
    describe_transaction,
    every_transaction,
    fence,
    open_producers,
    write_abort,
)

#: The longest that a transaction takes by default: one that is known to nobody for so long is really lost.
_SILENT_S = 900.0
#: How transactional ids of Spark sinks begin.
_OF_SINKS = "penstock-sink-"

app = typer.Typer(help="List, describe and abort transactions.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID", show_default=False)]


@app.command("list")
def list_transactions(
    only_open: Annotated[bool, typer.Option("--open", help="Only those that are not over.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """List transactional ids with what is going on under them, longest open first."""
    found = [_document(each) for each in every_transaction(Cluster(bootstrap))]
    _name_owners(bootstrap, found)
    rows = sorted(found, key=lambda row: -(row["open_s"] or 0.0))
    if only_open:
        rows = [row for row in rows if row["open_s"] is not None]
    if as_json:
        print_json(rows)
    elif rows:
        cells = ([*list(row.values())[:-1], _topics(row)] for row in rows)
        print_table([column.replace("_", " ") for column in rows[0]], cells)
    else:
        note("no open transactions" if only_open else "no transactional ids yet")


@app.command()
def describe(name: Name, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """Show the state of a transactional id, and the partitions in its open transaction."""
    document = _document(describe_transaction(Cluster(bootstrap), name))
    _name_owners(bootstrap, [document])
    if as_json:
        print_json(document)
        return
    places = document.pop("partitions")
    print_facts([(key.replace("_", " "), value) for key, value in document.items()])
    if places:
        print()
        print_table(list(places[0]), (list(place.values()) for place in places))


def _document(found: Transaction) -> dict[str, Any]:
    open_s = None if found.start_ms is None else round(max(time.time() - found.start_ms / 1000, 0.0), 1)
    is_over = found.state.startswith(("Complete", "Empty"))
    return {
        "transactional_id": found.transactional_id,
        "state": found.state,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "timeout_ms": found.timeout_ms,
        "open_s": None if is_over else open_s,
        "owner": None,
        "partitions": [{"topic": place.topic, "partition": place.partition} for place in found.places],
    }


def _topics(row: dict[str, Any]) -> str:
    return ", ".join(sorted({place["topic"] for place in row["partitions"]}))


def _name_owners(bootstrap: str, rows: list[dict[str, Any]]) -> None:
    """Which pipeline, or query of Spark, each belongs to."""
    if not any(str(row["transactional_id"]).startswith(_OF_SINKS) for row in rows):
        return
    from penstock.cli.pipeline_view import open_board  # loads much that other commands do not need
    from penstock.spark.pipelines.leftovers import owner_of
    from penstock.spark.pipelines.status import statuses

    with open_board(bootstrap, None) as board:
        known = statuses(board)
    for row in rows:
        row["owner"] = owner_of(row["transactional_id"], known)


@app.command()
def abort(name: Name, yes: Yes = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Abort the open transaction of a transactional id, and fence its producer.

    A producer that is still alive cannot go on with it, and has to be made anew. What has been decided on is not
    changed: a commit that is under way is waited for.
    """
    cluster = Cluster(bootstrap)
    found = describe_transaction(cluster, name)
    _refuse_sinks(bootstrap, _document(found))
    confirm(f"Abort what is open under {name} ({found.state}) and fence its producer?", yes=yes)
    fence(cluster, name)
    note(f"{name}: nothing is open, and its producer is fenced")


def _refuse_sinks(bootstrap: str, row: dict[str, Any]) -> None:
    """A pipeline may have decided to commit it, and would lose rows."""
    _name_owners(bootstrap, [row])
    if row["owner"] is None or row["open_s"] is None:
        return
    from penstock.cli.held_back import remedy

    raise Failure(
        f"{row['transactional_id']} belongs to {row['owner']}, which may have decided to commit it",
        hint=remedy(row),
    )


@app.command()
def hanging(
    silent_s: Annotated[
        float,
        typer.Option(
            "--silent", metavar="SECONDS", min=0, help="Only where the producer has been silent for so long."
        ),
    ] = _SILENT_S,
    abort_them: Annotated[bool, typer.Option("--abort", help="Write abort markers for all of them.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Find transactions that are open in a partition and that no coordinator knows, so that nobody ends them."""
    cluster = Cluster(bootstrap)
    found = _hanging(cluster, silent_s)
    rows = [_hanging_document(each) for each in found]
    if as_json and not abort_them:
        print_json(rows)
    elif rows and not as_json:
        print_table([column.replace("_", " ") for column in rows[0]], (list(row.values()) for row in rows))
    elif not rows:
        note(
            "no hanging transactions; penstock transaction list --open shows those that somebody may still end"
        )
    if not (abort_them and found):
        return
    confirm(f"Abort {plural(len(found), 'hanging transaction')}?", yes=yes)
    for each in found:
        write_abort(cluster, each)
    if as_json:
        print_json([{**row, "aborted": True} for row in rows])
    else:
        note(f"{plural(len(found), 'hanging transaction')} aborted")


def _hanging(cluster: Cluster, silent_s: float) -> list[OpenProducer]:
    """Those of which the coordinators know nothing, and that are there before and after they were asked."""
    latest_ms = (time.time() - silent_s) * 1000
    before = [each for each in open_producers(cluster) if each.last_ms <= latest_ms]
    if not before:
        return []
    known = {(each.producer_id, place) for each in every_transaction(cluster) for place in each.places}
    suspects = {_identity(each) for each in before if (each.producer_id, each.place) not in known}
    return [each for each in open_producers(cluster) if _identity(each) in suspects] if suspects else []


def _identity(found: OpenProducer) -> tuple[object, ...]:
    return found.place, found.producer_id, found.start_offset


def _hanging_document(found: OpenProducer) -> dict[str, Any]:
    return {
        "topic": found.place.topic,
        "partition": found.place.partition,
        "producer_id": found.producer_id,
        "epoch": found.epoch,
        "start_offset": found.start_offset,
        "silent_s": round(max(time.time() - found.last_ms / 1000, 0.0), 1),
    }
