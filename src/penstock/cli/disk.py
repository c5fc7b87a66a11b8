"""`penstock disk`: what is damaged in a data folder, and giving up what cannot be had back. For a stopped node."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import AsJson, Yes
from penstock.cli.output import confirm, note, plural, print_json, print_table

if TYPE_CHECKING:
    from penstock.log.repair import Finding

app = typer.Typer(help="Find damage in a data folder, and accept the loss.", no_args_is_help=True)

DataDir = Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="The data folder of a node.")]
Partition = Annotated[str, typer.Argument(metavar="TOPIC-PARTITION", show_default=False)]


@app.command("damage")
def list_damage(
    data_dir: DataDir,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every batch, and list what no start has met yet, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what is damaged. Records there are refused to readers (CORRUPT_MESSAGE); all others are served.

    What --verify finds in the folder of a stopped node is noted there: from the next start on it is refused, or fetched
    again where other replicas have it. A node may run meanwhile, but then nothing is noted, and what it is just writing
    can look damaged.
    """
    from penstock.log import repair
    from penstock.log.checkpoints import DamagedCheckpoint

    try:
        new = _verify(data_dir) if verify else []
        found = repair.list_damage(data_dir)
    except (OSError, DamagedCheckpoint) as error:
        raise Failure(str(error)) from None
    rows = [_row(item, "accepted" if item.damage.accepted else "refused") for item in found]
    rows += [_row(item, "not met yet") for item in new]
    if as_json:
        print_json(rows)
    elif rows:
        print_table([name.replace("_", " ") for name in rows[0]], (list(row.values()) for row in rows))
    else:
        note("no damage found" if verify else "no damage is known; --verify reads everything")


def _verify(data_dir: Path) -> "list[Finding]":
    """Returns what was not noted. The metadata log needs no note: each start reads all of it."""
    from penstock.cluster.names import CLUSTER_METADATA
    from penstock.log import repair
    from penstock.log.store import StoreLocked

    try:
        with repair.stopped(data_dir):
            found = list(repair.verify(data_dir))
            metadata = [item for item in found if item.topic == CLUSTER_METADATA]
            return [*metadata, *repair.note(data_dir, [item for item in found if item not in metadata])]
    except StoreLocked:
        return list(repair.verify(data_dir))


def _row(finding: "Finding", state: str) -> dict[str, str | int]:
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
    """Give up what is damaged in a partition, while its node is stopped; nothing is deleted from the disk.

    Readers then pass over the damage. A partition whose folder is gone begins again, empty, after its last offset.
    The metadata log (__cluster_metadata-0) is cut where the damage begins, after a copy of it was made: what was
    decided later is forgotten, topics too.
    """
    from penstock.cluster.names import CLUSTER_METADATA
    from penstock.log.names import parse_partition_folder

    parsed = parse_partition_folder(name)
    if parsed is None:
        raise Failure(f"{name!r} does not name a partition, as orders-0 does", exit_code=WRONG_USAGE)
    if not (data_dir / "meta.properties").exists():
        raise Failure(f"{data_dir} is not the data folder of a node", hint="--data-dir names another")
    confirm(f"Give up the damaged records of {name} for good?", yes=yes)
    if parsed == (CLUSTER_METADATA, 0):
        _accept_metadata(data_dir)
    else:
        _accept_partition(data_dir, *parsed)


def _accept_partition(data_dir: Path, topic: str, index: int) -> None:
    from penstock.log.checkpoints import DamagedCheckpoint
    from penstock.log.repair import NothingToAccept
    from penstock.log.repair import accept_loss as accept
    from penstock.log.store import StoreLocked

    try:
        accepted = accept(data_dir, topic, index)
    except StoreLocked as error:
        raise Failure(str(error), hint="stop the node first") from None
    except (OSError, NothingToAccept, DamagedCheckpoint) as error:
        raise Failure(str(error)) from None
    if not accepted:
        note(f"{topic}-{index} begins again, empty, when the node starts")
    for item in accepted:
        note(f"accepted: {item}")


def _accept_metadata(data_dir: Path) -> None:
    from penstock.broker.quorum.repair import Unrepairable, cut_damage
    from penstock.log.identity import WrongOwner
    from penstock.log.store import StoreLocked

    try:
        done = cut_damage(data_dir, now_ms=time.time_ns() // 1_000_000)
    except StoreLocked as error:
        raise Failure(str(error), hint="stop the node first") from None
    except (OSError, Unrepairable, WrongOwner) as error:
        raise Failure(str(error)) from None
    note(
        f"the metadata log ends at offset {done.end_offset} now, {plural(done.offsets_cut, 'offset')} earlier"
    )
    note(f"a copy of what it was: {done.copy}")
