"""`penstock topic hotkeys`: the heaviest keys of each partition, by a sample."""

import random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.failure import Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from penstock.cli.output import Cell, note, plural, print_json, print_table

if TYPE_CHECKING:
    from penstock.client.cluster import Cluster
    from penstock.client.hotkeys import HotKey
    from penstock.client.key_sampling import PartitionKeys

SAMPLE = 100_000
SAMPLE_MAX = 10_000_000


def hotkeys(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    sample: Annotated[
        int,
        typer.Option(
            "--sample", "-n", metavar="N", min=1, max=SAMPLE_MAX, help="About how many records to look at."
        ),
    ] = SAMPLE,
    top: Annotated[
        int,
        typer.Option("--top", "-t", metavar="K", min=1, max=1000, help="How many keys of each partition."),
    ] = 5,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="P", min=0, help="Only this one; may be given again."),
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-X", metavar="NAME=VALUE", help="A setting of the connection."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Show the heaviest keys of each partition, and their share of its records and bytes.

    Looks at records all over each partition; a share is off by no more than the figure after ± in 19 of 20 cases.
    """
    from penstock.cli.raw import open_cluster

    with open_cluster(bootstrap, properties) as cluster:
        found = _found(cluster, topic, sample, top, partition)
    if as_json:
        print_json({"topic": topic, "partitions": [_document(each) for each in found]})
    else:
        _print(topic, found)


def _found(
    cluster: "Cluster", topic: str, sample: int, top: int, partitions: list[int] | None
) -> list["PartitionKeys"]:
    from penstock.cli.client import no_such_topic
    from penstock.client.key_sampling import sampled

    info = cluster.topics([topic]).get(topic)
    if info is None:
        raise no_such_topic(topic, list(cluster.topics()))
    for each in partitions or ():
        if info.partition(each) is None:
            raise Failure(
                f"{topic} has {plural(len(info.partitions), 'partition')}, and {each} is none of them"
            )
    return list(sampled(cluster, info, sample=sample, top=top, chance=random.Random(), partitions=partitions))


# For people


def _print(topic: str, found: list["PartitionKeys"]) -> None:
    from penstock.client.hotkeys import advice

    looked_at = sum(each.sampled for each in found)
    if not looked_at:
        note(f"{topic} is empty")
        return
    rows = [_row(each, key) for each in found for key in each.keys]
    if not rows:
        note(f"none of the {plural(looked_at, 'record')} looked at has a key")
        return
    print_table(["partition", "key", "records", "bytes", "share of records", "share of bytes"], rows)
    note(_extent(found, looked_at))
    told = advice(sum(key.is_hot for each in found for key in each.keys))
    if told is not None:
        note(told)


def _row(found: "PartitionKeys", key: "HotKey") -> list[Cell]:
    from penstock.client.hotkeys import shown

    return [
        found.partition,
        shown(key.key),
        key.records,
        key.bytes,
        _share(key.share, key.share_error),
        _share(key.bytes_share, key.bytes_share_error),
    ]


def _share(share: float, error: float) -> str:
    return f"{share:.1%}" + (f" ± {error:.1%}" if error else "")


def _extent(found: list["PartitionKeys"], looked_at: int) -> str:
    if not any(key.share_error or key.bytes_share_error for each in found for key in each.keys):
        return f"all {plural(looked_at, 'record')} looked at: shares are exact"
    there = sum(each.next_offset - each.first_offset for each in found)
    return (
        f"{looked_at} of about {plural(there, 'record')} looked at: shares are right to within ± in 19 of 20 cases; "
        "--sample looks at more"
    )


# For scripts


def _document(found: "PartitionKeys") -> dict[str, Any]:
    return {
        "partition": found.partition,
        "first_offset": found.first_offset,
        "next_offset": found.next_offset,
        "sampled": found.sampled,
        "without_key": found.keyless,
        "whole": found.is_whole,
        "keys": [_key_document(key) for key in found.keys],
    }


def _key_document(key: "HotKey") -> dict[str, Any]:
    from penstock.cli.records import to_json

    return {
        "key": to_json(key.key),
        "records": key.records,
        "bytes": key.bytes,
        "share": key.share,
        "share_error": key.share_error,
        "bytes_share": key.bytes_share,
        "bytes_share_error": key.bytes_share_error,
        "hot": key.is_hot,
    }
