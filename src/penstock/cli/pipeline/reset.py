"""`penstock pipeline reset`: another generation of a pipeline, which begins where it is told to."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.output import confirm, note, print_json, print_table
from penstock.cli.pipeline_view import Seen, seen_one
from penstock.cli.positions import Anchor, Position, resolve
from penstock.cli.reset_target import Offsets, Shift, Target
from penstock.client.cluster import Cluster
from penstock.client.letters import is_letter_topic
from penstock.client.metadata import Place
from penstock.client.positions import EARLIEST, LATEST, commit, committed, list_offsets
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.leftovers import release, sink_queries
from penstock.spark.pipelines.status import Generation, Status, generation_of, write_generation
from penstock.spark.progress import METADATA

_WORDS = {Anchor.BEGINNING: "earliest", Anchor.END: "latest"}


def reset_pipeline(
    board: Board,
    name: str,
    target: Target,
    topics: Sequence[str],
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    seen = seen_one(board, name)
    refuse_running(seen)
    if seen.status.group is None:
        _settle_job(board, seen.status, dry_run=dry_run, yes=yes, as_json=as_json)
        return
    current = _current(board.cluster, seen.status.group)
    planned = _planned(board.cluster, current, target, topics)
    following = Generation(number=generation_of(board, name).number + 1, starting=_starting(target, planned))
    plan = [
        {"topic": topic, "partition": partition, "from": current.get((topic, partition)), "to": offset}
        for (topic, partition), offset in sorted(planned.items())
    ]
    if plan and not as_json:
        print_table(list(plan[0]), (list(row.values()) for row in plan))
    if not dry_run:
        confirm(f"Begin generation {following.number} of {name}?", yes=yes)
        _apply(board, seen, planned, following)
    if as_json:
        document = {"pipeline": name, "generation": following.number, "applied": not dry_run}
        print_json(document | {"partitions": plan})
    else:
        told = f"{name} begins generation {following.number} when it runs next"
        note("nothing was changed (dry run)" if dry_run else told)


def _settle_job(board: Board, status: Status, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """A job has no position to move. One that was killed may have left transactions open, which hold readers back."""
    name = status.name
    if not dry_run:
        confirm(f"End what {name} has left open?", yes=yes)
        release(board.cluster, sink_queries(status))
    if as_json:
        print_json({"job": name, "settled": not dry_run})
        return
    told = (
        f"nothing of {name} is open; run again it goes on where it left off, under another id it begins anew"
    )
    note("nothing was changed (dry run)" if dry_run else told)


def refuse_running(seen: Seen) -> None:
    if not seen.state.is_over:
        name = seen.status.name
        raise Failure(f"{name} is {seen.state.value}", hint=f"penstock pipeline stop {name}")


def _current(cluster: Cluster, group: str) -> dict[Place, int]:
    """Where the group stands in all partitions of the topics that it has read and that are still there."""
    found = {place: at.offset for place, at in committed(cluster, group, stable=False).items()}
    there = cluster.topics({topic for topic, _ in found})
    return {place: offset for place, offset in found.items() if place[0] in there}


def _planned(
    cluster: Cluster, current: dict[Place, int], target: Target, only: Sequence[str]
) -> dict[Place, int]:
    """What waits in retry topics has been read from its own topic: it is neither left out nor done twice."""
    topics = cluster.topics({topic for topic, _ in current})
    places = [(name, part.index) for name, topic in topics.items() for part in topic.partitions]
    if isinstance(target, Offsets):
        return _resolved(cluster, {**current, **_known(dict(target.by_place), places)})
    chosen = _chosen(places, only)
    kept = {
        place: current.get(place, EARLIEST)
        for place in places
        if place not in chosen or is_letter_topic(place[0])
    }
    moved = [place for place in places if place not in kept]
    return _resolved(cluster, kept) | _moved(cluster, moved, current, target)


def _moved(
    cluster: Cluster, places: list[Place], current: dict[Place, int], target: Position | Shift
) -> dict[Place, int]:
    if not places:
        return {}
    if not isinstance(target, Shift) and target.anchor is Anchor.TIMESTAMP:
        return _at_time(cluster, dict.fromkeys(places, target.value))
    first = _resolved(cluster, dict.fromkeys(places, EARLIEST))
    end = _resolved(cluster, dict.fromkeys(places, LATEST))
    if isinstance(target, Shift):
        wanted = {place: current.get(place, first[place]) + target.by for place in places}
        return {place: min(max(at, first[place]), end[place]) for place, at in wanted.items()}
    return {place: resolve(target, first=first[place], end=end[place], at_timestamp=None) for place in places}


def _chosen(places: list[Place], only: Sequence[str]) -> set[Place]:
    """Those that `--topic TOPIC[:PARTITION]` names; all of them without it."""
    if not only:
        return set(places)
    chosen: set[Place] = set()
    for text in only:
        name, colon, index = text.partition(":")
        found = {place for place in places if place[0] == name and (not colon or str(place[1]) == index)}
        if not found:
            raise Failure(f"the pipeline does not read {text}")
        chosen |= found
    return chosen


def _known(target: dict[Place, int], places: list[Place]) -> dict[Place, int]:
    unknown = sorted(set(target) - set(places))
    if unknown and places:
        named = ", ".join(f"{topic}[{partition}]" for topic, partition in unknown)
        raise Failure(f"the pipeline does not read {named}", exit_code=WRONG_USAGE)
    return target


def _resolved(cluster: Cluster, wanted: dict[Place, int]) -> dict[Place, int]:
    """With offsets for the ends of logs."""
    edges = {place: at for place, at in wanted.items() if at < 0}
    found = list_offsets(cluster, edges) if edges else {}
    return wanted | {place: at.offset for place, at in found.items() if at is not None}


def _at_time(cluster: Cluster, wanted: dict[Place, int]) -> dict[Place, int]:
    found = list_offsets(cluster, wanted) if wanted else {}
    late = {place: LATEST for place, at in found.items() if at is None}
    return {place: at.offset for place, at in found.items() if at is not None} | _resolved(cluster, late)


def _starting(target: Target, planned: dict[Place, int]) -> str:
    """As `startingOffsets` takes it; a pipeline that has read nothing yet takes the words as they are."""
    if planned:
        return _offsets_json(planned)
    match target:
        case Offsets():
            return _offsets_json(dict(target.by_place))
        case Position(Anchor.BEGINNING | Anchor.END):
            return _WORDS[target.anchor]
        case Position(Anchor.TIMESTAMP):
            return str(target.value)
    raise Failure(
        "the pipeline has read nothing yet, so there is nothing to count from",
        hint='--to-earliest, --to-latest, --to-timestamp, or --to {"topic": {"0": 23}}',
        exit_code=WRONG_USAGE,
    )


def _offsets_json(offsets: dict[Place, int]) -> str:
    topics: dict[str, dict[str, Any]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        topics.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(topics)


def _apply(board: Board, seen: Seen, planned: dict[Place, int], following: Generation) -> None:
    """The queries of the old generation never run again: what they have decided is finished, all else is aborted."""
    status = seen.status
    assert status.group is not None
    release(board.cluster, sink_queries(status))
    write_generation(board, status.name, following)
    commit(board.cluster, status.group, planned, metadata=METADATA)
