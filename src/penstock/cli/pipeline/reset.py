"""`penstock pipeline reset` and `release`.

`reset` starts another generation of a pipeline, with a new checkpoint, at given offsets. `release` ends the
transactions that a killed pipeline left open.
"""

import json
from collections.abc import Sequence
from typing import Any

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import (
    OffsetShift,
    OffsetSpec,
    OffsetSpecKind,
    PartitionOffsets,
    ResetTarget,
    resolve_offset,
)
from penstock.cli.output import confirm, note, plural, print_json, print_table
from penstock.cli.pipeline.status import PipelineView, topic_names, transaction_documents, view_pipeline
from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, commit_offsets, committed_offsets, list_offsets
from penstock.client.wire.transactions import TransactionInfo
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.offsets import GROUP_METADATA
from penstock.spark.pipelines.open_transactions import (
    end_open_transactions,
    list_open_transactions,
    sink_queries,
)
from penstock.spark.pipelines.status import (
    Generation,
    PipelineStatus,
    read_generation,
    read_statuses,
    write_generation,
)

_STARTING_OFFSETS = {OffsetSpecKind.BEGINNING: "earliest", OffsetSpecKind.END: "latest"}


def reset_pipeline(
    store: DocumentStore,
    name: str,
    target: ResetTarget,
    topics: Sequence[str],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    seen = view_pipeline(store, name)
    check_not_running(seen)
    if seen.status.group is None:
        _reset_job(store, seen.status, dry_run=dry_run, yes=yes, as_json=as_json)
        return
    current = _current_offsets(store.cluster, seen.status.group)
    planned = _plan_offsets(store.cluster, current, target, topics)
    following = Generation(
        number=read_generation(store, name).number + 1, starting=_starting_offsets(target, planned)
    )
    plan = [
        {"topic": topic, "partition": partition, "from": current.get((topic, partition)), "to": offset}
        for (topic, partition), offset in sorted(planned.items())
    ]
    if plan and not as_json:
        print_table(list(plan[0]), (list(row.values()) for row in plan))
    if not dry_run:
        confirm(f"Begin generation {following.number} of {name}?", yes=yes)
        _apply_reset(store, seen, planned, following)
    if as_json:
        document = {"pipeline": name, "generation": following.number, "applied": not dry_run}
        print_json(document | {"partitions": plan})
    else:
        note(
            "nothing was changed (dry run)"
            if dry_run
            else f"{name} begins generation {following.number} when it runs next"
        )


def _reset_job(
    store: DocumentStore, status: PipelineStatus, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """A job has no offsets to move. But a killed job may have left transactions open, which block readers."""
    name = status.name
    if not dry_run:
        confirm(f"End the open transactions of {name}?", yes=yes)
        end_open_transactions(store.cluster, sink_queries(status))
    if as_json:
        print_json({"job": name, "settled": not dry_run})
        return
    note(
        "nothing was changed (dry run)"
        if dry_run
        else f"{name} has no open transactions; it continues when it runs again, and starts over under another id"
    )


def check_not_running(seen: PipelineView) -> None:
    if not seen.state.is_over:
        name = seen.status.name
        raise CommandError(f"{name} is {seen.state.value}", hint=f"`penstock pipeline stop {name}` stops it")


def _current_offsets(cluster: Cluster, group: str) -> dict[TopicPartition, int]:
    """The committed offsets of the group, without topics that no longer exist."""
    found = {
        partition: at.offset for partition, at in committed_offsets(cluster, group, stable=False).items()
    }
    there = cluster.topics({topic for topic, _ in found})
    return {partition: offset for partition, offset in found.items() if partition[0] in there}


def _plan_offsets(
    cluster: Cluster, current: dict[TopicPartition, int], target: ResetTarget, only: Sequence[str]
) -> dict[TopicPartition, int]:
    """Retry topics keep their offsets: their records are neither skipped nor processed twice.

    The pipeline has already read these records from their original topics.
    """
    topics = cluster.topics({topic for topic, _ in current})
    partitions = [(name, part.index) for name, topic in topics.items() for part in topic.partitions]
    if isinstance(target, PartitionOffsets):
        return _resolve_edges(cluster, {**current, **_check_known(dict(target.by_partition), partitions)})
    chosen = _select_partitions(partitions, only)
    kept = {
        partition: current.get(partition, EARLIEST)
        for partition in partitions
        if partition not in chosen or is_failure_topic(partition[0])
    }
    moved = [partition for partition in partitions if partition not in kept]
    return _resolve_edges(cluster, kept) | _moved_offsets(cluster, moved, current, target)


def _moved_offsets(
    cluster: Cluster,
    partitions: list[TopicPartition],
    current: dict[TopicPartition, int],
    target: OffsetSpec | OffsetShift,
) -> dict[TopicPartition, int]:
    if not partitions:
        return {}
    if not isinstance(target, OffsetShift) and target.kind is OffsetSpecKind.TIMESTAMP:
        return _offsets_at_time(cluster, dict.fromkeys(partitions, target.value))
    first = _resolve_edges(cluster, dict.fromkeys(partitions, EARLIEST))
    end = _resolve_edges(cluster, dict.fromkeys(partitions, LATEST))
    if isinstance(target, OffsetShift):
        wanted = {partition: current.get(partition, first[partition]) + target.by for partition in partitions}
        return {partition: min(max(at, first[partition]), end[partition]) for partition, at in wanted.items()}
    return {
        partition: resolve_offset(target, first=first[partition], end=end[partition], at_timestamp=None)
        for partition in partitions
    }


def _select_partitions(partitions: list[TopicPartition], only: Sequence[str]) -> set[TopicPartition]:
    """The partitions that `--topic TOPIC[:PARTITION]` names; all of them without it."""
    if not only:
        return set(partitions)
    chosen: set[TopicPartition] = set()
    for text in only:
        name, colon, index = text.partition(":")
        found = {
            partition
            for partition in partitions
            if partition[0] == name and (not colon or str(partition[1]) == index)
        }
        if not found:
            raise CommandError(f"the pipeline does not read {text}")
        chosen |= found
    return chosen


def _check_known(target: dict[TopicPartition, int], tps: list[TopicPartition]) -> dict[TopicPartition, int]:
    unknown = sorted(set(target) - set(tps))
    if unknown and tps:
        named = ", ".join(f"{topic}[{partition}]" for topic, partition in unknown)
        raise CommandError(f"the pipeline does not read {named}", exit_code=EXIT_USAGE)
    return target


def _resolve_edges(cluster: Cluster, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Replaces EARLIEST and LATEST by the offsets that they stand for."""
    edges = {partition: at for partition, at in wanted.items() if at < 0}
    found = list_offsets(cluster, edges) if edges else {}
    return wanted | {partition: at.offset for partition, at in found.items() if at is not None}


def _offsets_at_time(cluster: Cluster, wanted: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    found = list_offsets(cluster, wanted) if wanted else {}
    late = {partition: LATEST for partition, at in found.items() if at is None}
    return {partition: at.offset for partition, at in found.items() if at is not None} | _resolve_edges(
        cluster, late
    )


def _starting_offsets(target: ResetTarget, planned: dict[TopicPartition, int]) -> str:
    """A value for `startingOffsets`. If the pipeline has read nothing yet, this is the target as the user wrote it."""
    if planned:
        return _offsets_json(planned)
    match target:
        case PartitionOffsets():
            return _offsets_json(dict(target.by_partition))
        case OffsetSpec(OffsetSpecKind.BEGINNING | OffsetSpecKind.END):
            return _STARTING_OFFSETS[target.kind]
        case OffsetSpec(OffsetSpecKind.TIMESTAMP):
            return str(target.value)
    raise CommandError(
        "the pipeline has read nothing yet, so this target has no offset to start from",
        hint='give --to-earliest, --to-latest, --to-timestamp, or --to {"topic": {"0": 23}}',
        exit_code=EXIT_USAGE,
    )


def _offsets_json(offsets: dict[TopicPartition, int]) -> str:
    topics: dict[str, dict[str, Any]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        topics.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(topics)


def _apply_reset(
    store: DocumentStore, seen: PipelineView, planned: dict[TopicPartition, int], following: Generation
) -> None:
    """Queries of the old generation never run again: commits what they had decided to write, and aborts the rest."""
    status = seen.status
    assert status.group is not None
    end_open_transactions(store.cluster, sink_queries(status))
    write_generation(store, status.name, following)
    commit_offsets(store.cluster, status.group, planned, metadata=GROUP_METADATA)


def release_pipeline(store: DocumentStore, name: str, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Raises CommandError if it runs, and for a name that is neither a pipeline nor a query with open transactions."""
    known = read_statuses(store)
    queries: tuple[str, ...] = (name,)
    found: list[TransactionInfo] = list_open_transactions(store.cluster, queries) if name not in known else []
    if not found:
        seen = view_pipeline(store, name)
        check_not_running(seen)
        queries = sink_queries(seen.status)
        found = list_open_transactions(store.cluster, queries)
    rows = transaction_documents(found, known)
    if rows and not as_json:
        cells = ([row["transactional_id"], round(row["open_s"]), topic_names([row])] for row in rows)
        print_table(["transactional id", "open s", "holds back"], cells)
    if rows and not dry_run:
        confirm(f"End {plural(len(rows), 'open transaction')} of {name}?", yes=yes)
        end_open_transactions(store.cluster, queries)
    if as_json:
        print_json({"pipeline": name, "released": bool(rows) and not dry_run, "transactions": rows})
    elif not rows:
        note(f"{name} has no open transactions")
    else:
        note(
            "nothing was changed (dry run)"
            if dry_run
            else f"{name} has no open transactions now: readers of {topic_names(rows)} continue"
        )
