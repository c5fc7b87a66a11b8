"""Finds topics and their offsets for a verb."""

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.cli.errors import CommandError
from penstock.cli.options import OffsetSpec, OffsetSpecKind, resolve_offset
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets


class PartitionName(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


def existing_topics(cluster: Cluster, names: Iterable[str]) -> dict[str, TopicInfo]:
    """Raises CommandError for a topic that does not exist."""
    wanted = tuple(names)
    found = cluster.topics(wanted)
    for name in wanted:
        if name not in found:
            known = list(cluster.topics())
            raise CommandError(
                f"topic {name} does not exist",
                hint=did_you_mean(name, known, "`penstock topic list` shows all topics"),
            )
    return {name: found[name] for name in wanted}


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def partition_names(topics: Mapping[str, TopicInfo]) -> list[PartitionName]:
    return [PartitionName(name, part.index) for name, topic in topics.items() for part in topic.partitions]


def log_ends(
    cluster: Cluster, partitions: Iterable[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """The first offset of each partition, and the offset after its last record."""
    wanted = list(partitions)
    return _list(cluster, dict.fromkeys(wanted, EARLIEST)), _list(cluster, dict.fromkeys(wanted, LATEST))


def _list(cluster: Cluster, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """-1 where a timestamp lies after the last record."""
    found = list_offsets(cluster, wanted) if wanted else {}
    return {partition: -1 if at is None else at.offset for partition, at in found.items()}


def resolve_offsets(
    cluster: Cluster, partitions: Iterable[TopicPartition], spec: OffsetSpec
) -> dict[TopicPartition, int]:
    wanted = list(partitions)
    first, end = log_ends(cluster, wanted)
    at_timestamp: dict[TopicPartition, int] = {}
    if spec.kind is OffsetSpecKind.TIMESTAMP:
        at_timestamp = _list(cluster, dict.fromkeys(wanted, spec.value))
    return {
        each: resolve_offset(spec, first=first[each], end=end[each], at_timestamp=at_timestamp.get(each))
        for each in wanted
    }
