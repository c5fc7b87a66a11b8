"""`penstock pipeline release`: end what a pipeline that was killed has left open."""

from penstock.cli.held_back import documents, topics_of
from penstock.cli.output import confirm, note, plural, print_json, print_table
from penstock.cli.pipeline_reset import refuse_running
from penstock.cli.pipeline_view import seen_one
from penstock.client.transactions import TransactionInfo
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.leftovers import left_open, release, sink_queries
from penstock.spark.pipelines.status import statuses


def release_pipeline(board: Board, name: str, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Raises Failure for one that runs, and for a name that neither a pipeline nor an open query has."""
    known = statuses(board)
    queries: tuple[str, ...] = (name,)
    found: list[TransactionInfo] = left_open(board.cluster, queries) if name not in known else []
    if not found:
        seen = seen_one(board, name)
        refuse_running(seen)
        queries = sink_queries(seen.status)
        found = left_open(board.cluster, queries)
    rows = documents(found, known)
    if rows and not as_json:
        cells = ([row["transactional_id"], round(row["open_s"]), topics_of([row])] for row in rows)
        print_table(["transactional id", "open s", "holds back"], cells)
    if rows and not dry_run:
        confirm(f"End {plural(len(rows), 'open transaction')} of {name}?", yes=yes)
        release(board.cluster, queries)
    if as_json:
        print_json({"pipeline": name, "released": bool(rows) and not dry_run, "transactions": rows})
    elif not rows:
        note(f"nothing of {name} is open")
    else:
        told = f"nothing of {name} is open any more: readers of {topics_of(rows)} go on"
        note("nothing was changed (dry run)" if dry_run else told)
