"""`penstock cluster unregister`: forget a broker that will not come back."""

from typing import Annotated

import typer

from penstock.cli.client import Cluster
from penstock.cli.cluster_requests import Refused, an_address
from penstock.cli.cluster_requests import unregister as ask_to_unregister
from penstock.cli.failure import Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Yes
from penstock.cli.output import confirm, note, plural


def unregister(
    broker_id: Annotated[int, typer.Argument(metavar="ID", help="The broker's id.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
) -> None:
    """Forget a broker that is gone for good.

    Move its replicas first: penstock cluster rebalance --remove-broker ID.
    """
    cluster = Cluster(bootstrap)
    held = _replicas_on(cluster, broker_id)
    if held:
        note(f"broker {broker_id} still holds {plural(held, 'replica')}; they stay assigned to it")
    confirm(f"Forget broker {broker_id}?", yes=yes)
    try:
        ask_to_unregister(an_address(cluster), broker_id)
    except Refused as error:
        raise Failure(f"broker {broker_id} was not unregistered: {error}") from None
    except OSError as error:
        raise Failure(f"the controller does not answer: {error}") from None
    note(f"broker {broker_id} unregistered")


def _replicas_on(cluster: Cluster, broker_id: int) -> int:
    return sum(
        broker_id in partition.replicas
        for topic in cluster.metadata().topics.values()
        for partition in topic.partitions.values()
    )
