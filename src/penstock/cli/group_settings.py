"""The settings that groups have of their own: shown by `penstock group describe`, changed by `group alter`."""

from typing import Annotated

import typer

from penstock.cli.client import REQUEST_TIMEOUT_S, Cluster
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, pairs
from penstock.cli.output import note

#: As brokers number where a setting comes from.
_OF_THE_GROUP = 8


def own_settings(cluster: Cluster, group: str) -> dict[str, str | None]:
    """Empty too where the cluster knows no settings of groups."""
    from confluent_kafka.admin import ConfigResource

    resource = ConfigResource(ConfigResource.Type.GROUP, group)
    answer = cluster.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    entries = cluster.wait_each({group: answer[resource]})[group]
    if isinstance(entries, Failure):
        return {}
    return {
        entry.name: entry.value
        for entry in sorted(entries.values(), key=lambda entry: str(entry.name))
        if int(getattr(entry.source, "value", entry.source)) == _OF_THE_GROUP
    }


def alter(
    group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting of the group; may be repeated."),
    ] = None,
    delete_config: Annotated[
        list[str] | None,
        typer.Option("--delete-config", "-d", metavar="NAME", help="Return a setting to its default."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Change the settings of a group. It need not exist yet."""
    settings, removed = pairs(config or (), "--config"), delete_config or []
    if not settings and not removed:
        raise Failure("nothing to change", hint="give --config or --delete-config", exit_code=WRONG_USAGE)
    cluster = Cluster(bootstrap)
    cluster.alter_settings("GROUP", group, settings, removed)
    note(f"{group} altered")
