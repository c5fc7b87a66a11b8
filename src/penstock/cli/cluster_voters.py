"""`penstock cluster voters`: who keeps the metadata, and removing one that does not come back."""

from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster
from penstock.cli.cluster_findings import gone_voters
from penstock.cli.cluster_requests import QuorumReplica, Refused, an_address, remove_voter
from penstock.cli.cluster_status import QUORUM_TIMEOUT_S
from penstock.cli.cluster_view import ClusterView, look
from penstock.cli.failure import Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import confirm, note, print_json, print_table

app = typer.Typer(help="List the voters of the quorum, and remove one that is gone.", no_args_is_help=True)


@app.command("list")
def list_voters(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """List the voters with their part, how far they are behind, and whether they are gone."""
    view = _look(Cluster(bootstrap))
    assert view.quorum is not None
    gone = gone_voters(view)
    rows = [_row(view, voter, is_gone=voter.id in gone) for voter in view.quorum.voters]
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]), (list(row.values()) for row in rows))


def _row(view: ClusterView, voter: QuorumReplica, *, is_gone: bool) -> dict[str, Any]:
    assert view.quorum is not None
    is_leader = voter.id == view.quorum.leader
    return {
        "node": voter.id,
        "state": "leader" if is_leader else "gone" if is_gone else "voter",
        "lag": None if voter.end_offset < 0 else max(0, view.quorum.high_watermark - voter.end_offset),
        "directory": str(voter.directory),
    }


@app.command("remove")
def remove(
    voter_id: Annotated[int, typer.Argument(metavar="ID", help="The node's id.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
) -> None:
    """Take a voter out of the quorum that will not come back.

    The majority is then one of those that are left. A node that runs joins the voters again by itself.
    """
    cluster = Cluster(bootstrap)
    view = _look(cluster)
    assert view.quorum is not None
    voters = {voter.id: voter for voter in view.quorum.voters}
    if voter_id not in voters:
        named = ", ".join(map(str, voters))
        raise Failure(f"node {voter_id} is no voter", hint=f"the voters are {named}")
    if voter_id not in gone_voters(view):
        raise Failure(
            f"voter {voter_id} is alive, and would join again", hint="stop that node first, or let it be"
        )
    left = len(voters) - 1
    confirm(f"Remove voter {voter_id}? {left} are left, of which {left // 2 + 1} must be there", yes=yes)
    try:
        remove_voter(an_address(cluster), view.cluster_id, voters[voter_id])
    except Refused as error:
        raise Failure(f"voter {voter_id} was not removed: {error}") from None
    except OSError as error:
        raise Failure(f"the controller does not answer: {error}") from None
    note(f"voter {voter_id} removed")


def _look(cluster: Cluster) -> ClusterView:
    """Raises Failure where no controller answers."""
    view = look(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    if view.quorum is None:
        raise Failure(
            "no controller answers: a majority of the voters is not there",
            hint="a voter can be removed only by the majority; bring back as many nodes as that takes",
        )
    return view
