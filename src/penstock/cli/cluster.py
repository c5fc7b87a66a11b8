"""`penstock cluster`: start one, look at it, and put its replicas where they belong. One file per verb."""

import typer

from penstock.cli import (
    cluster_features,
    cluster_info,
    cluster_rebalance,
    cluster_start,
    cluster_status,
    cluster_unregister,
    cluster_voters,
)

app = typer.Typer(help="Start, watch and rebalance a cluster.", no_args_is_help=True)

app.command()(cluster_start.start)
app.command()(cluster_start.stop)
app.command("restart")(cluster_start.restart_node)
app.command()(cluster_status.status)
app.command()(cluster_rebalance.rebalance)
app.command()(cluster_unregister.unregister)
app.command()(cluster_info.info)
app.command("features")(cluster_features.show_or_set)
app.add_typer(cluster_voters.app, name="voters")
