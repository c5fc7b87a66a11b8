"""`penstock disk`: list damage in a data directory, and accept the loss of what cannot be recovered.

For a stopped node.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes
from penstock.cli.output import confirm, note, plural, print_rows

if TYPE_CHECKING:
    from penstock.log.offline_repair import DamageFinding

app = typer.Typer(help="Find damage in a data directory, and accept the loss.", no_args_is_help=True)

DataDir = Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="The data directory of a node.")]
Partition = Annotated[str, typer.Argument(metavar="TOPIC-PARTITION", show_default=False)]


@app.command("damage")
def list_damage(
    data_dir: DataDir,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every batch, and also list damage that no start of the node has found yet."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List damage. Reading the damaged records fails (CORRUPT_MESSAGE); all others are served.

    --verify records the damage that it finds, if the node is stopped: from the next start on the node refuses to serve
    it, or fetches it again from other replicas. While the node runs nothing is recorded, and batches that are being
    written can look damaged.
    """
    from penstock.log import offline_repair
    from penstock.log.checkpoints import CorruptCheckpoint

    try:
        new = _verify(data_dir) if verify else []
        found = offline_repair.list_damage(data_dir)
    except (OSError, CorruptCheckpoint) as error:
        raise CommandError(_reason(error)) from None
    rows = [_damage_row(item, "accepted" if item.damage.accepted else "refused") for item in found]
    rows += [_damage_row(item, "not met yet") for item in new]
    if_none = "no damage found" if verify else "no damage is recorded; --verify reads all data"
    print_rows(rows, as_json=as_json, if_none=if_none)


def _verify(data_dir: Path) -> "list[DamageFinding]":
    """Returns the damage that was not recorded. The metadata log needs no record: each start reads all of it."""
    from penstock.cluster.topic_names import CLUSTER_METADATA
    from penstock.log import offline_repair
    from penstock.log.log_manager import DataDirectoryLocked

    try:
        with offline_repair.locked_directory(data_dir):
            found = list(offline_repair.verify(data_dir))
            metadata = [item for item in found if item.topic == CLUSTER_METADATA]
            return [
                *metadata,
                *offline_repair.record_damage(data_dir, [item for item in found if item not in metadata]),
            ]
    except DataDirectoryLocked:
        return list(offline_repair.verify(data_dir))


def _damage_row(finding: "DamageFinding", state: str) -> dict[str, str | int]:
    damage = finding.damage
    return {
        "partition": f"{finding.topic}-{finding.partition}",
        "from_offset": damage.start_offset,
        "to_offset": damage.end_offset - 1,
        "bytes": damage.end_position - damage.position,
        "state": state,
    }


@app.command("accept-loss")
def accept_loss(name: Partition, data_dir: DataDir, yes: Yes = False) -> None:
    """Accept the loss of damaged records of a partition, while its node is stopped. Nothing is deleted from the disk.

    Readers then skip the damage. A partition whose directory is missing starts empty, after its last offset.
    The metadata log (__cluster_metadata-0) is truncated where the damage begins, after a copy was made: later
    changes of the metadata are lost, including new topics.
    """
    from penstock.cluster.topic_names import CLUSTER_METADATA
    from penstock.log.data_directory import parse_log_dir_name

    parsed = parse_log_dir_name(name)
    if parsed is None:
        raise CommandError(
            f"{name!r} does not name a partition",
            hint="write TOPIC-PARTITION, such as orders-0",
            exit_code=EXIT_USAGE,
        )
    if not (data_dir / "meta.properties").exists():
        raise CommandError(f"{data_dir} is not the data directory of a node", hint="give another --data-dir")
    confirm(f"Accept the loss of the damaged records of {name}?", yes=yes)
    if parsed == (CLUSTER_METADATA, 0):
        _accept_metadata_loss(data_dir)
    else:
        _accept_partition_loss(data_dir, *parsed)


def _accept_partition_loss(data_dir: Path, topic: str, index: int) -> None:
    from penstock.log.checkpoints import CorruptCheckpoint
    from penstock.log.log_manager import DataDirectoryLocked
    from penstock.log.offline_repair import NoKnownDamage
    from penstock.log.offline_repair import accept_loss as accept

    try:
        accepted = accept(data_dir, topic, index)
    except DataDirectoryLocked as error:
        raise CommandError(str(error), hint="stop the node first") from None
    except (OSError, NoKnownDamage, CorruptCheckpoint) as error:
        raise CommandError(_reason(error)) from None
    if not accepted:
        note(f"{topic}-{index} starts empty when the node starts")
    for item in accepted:
        note(f"accepted: {item}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _accept_metadata_loss(data_dir: Path) -> None:
    from penstock.broker.quorum.repair import Unrepairable, cut_damage
    from penstock.log.data_directory import InconsistentMetaProperties
    from penstock.log.log_manager import DataDirectoryLocked

    try:
        done = cut_damage(data_dir, now_ms=time.time_ns() // 1_000_000)
    except DataDirectoryLocked as error:
        raise CommandError(str(error), hint="stop the node first") from None
    except (OSError, Unrepairable, InconsistentMetaProperties) as error:
        raise CommandError(_reason(error)) from None
    note(
        f"truncated the metadata log by {plural(done.offsets_cut, 'offset')}; it now ends at offset {done.end_offset}"
    )
    note(f"the old log was copied to {done.copy}")
