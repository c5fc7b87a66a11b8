"""`penstock dlq replay`: what it is going to do, that it is doing it, and what came of it."""

from typing import Any

from penstock.cli.dlq_progress import progress, stopping
from penstock.cli.dlq_topics import new_id, turn_of
from penstock.cli.failure import FAILED, Failure
from penstock.cli.output import note, plural, print_json, print_table
from penstock.client.cluster import Cluster
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.marks import State
from penstock.client.deadletters.replaying import Outcome, Replay, Request, Survey, survey
from penstock.client.deadletters.routing import Aim, Destination
from penstock.client.deadletters.topics import DeadLetterError
from penstock.client.errors import ClientError
from penstock.client.metadata import TopicInfo


def destination_of(to: str, *, keeps_times: bool) -> Destination:
    if to in (Aim.ORIGINAL.value, Aim.GROUP.value):
        return Destination(aim=Aim(to), keeps_times=keeps_times)
    return Destination(aim=Aim.TOPIC, topic=to, keeps_times=keeps_times)


def replay_letters(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: Filter,
    destination: Destination,
    *,
    rate_per_s: float | None,
    limit: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Returns the exit code."""
    request = Request(
        topic=topic,
        id=new_id(),
        wanted=wanted,
        destination=destination,
        rate_per_s=rate_per_s,
        limit=limit,
    )
    found = _surveyed(cluster, request)
    if dry_run:
        _print_plan(request, found, as_json=as_json)
        return 0
    outcome = Outcome()
    if found.total:
        outcome = _run(cluster, request, found)
    _print_outcome(request, found, outcome, as_json=as_json)
    return FAILED if outcome.refused or outcome.is_stopped else 0


def _surveyed(cluster: Cluster, request: Request) -> Survey:
    try:
        found = survey(cluster, request)
    except DeadLetterError as error:
        is_named = request.destination.topic is not None
        raise Failure(str(error), hint=None if is_named else _HINTS[request.destination.aim]) from None
    for text in found.notes:
        note(text)
    return found


_HINTS = {
    Aim.ORIGINAL: "--to TOPIC sends all of them to one topic; --error, --group and others choose",
    Aim.GROUP: "--to original publishes them for everybody; --group chooses those of other groups",
}


def _run(cluster: Cluster, request: Request, found: Survey) -> Outcome:
    with stopping() as should_stop, progress(found.total, "letters") as tell:
        replay = Replay(cluster, request, found, progress=tell, should_stop=should_stop)
        try:
            return replay.run(turn_of(cluster, request.topic))
        except ClientError as error:
            done = f"{plural(replay.outcome.replayed, 'letter')} replayed"
            raise Failure(
                f"{error} ({done})", hint="run it again to go on: what was replayed is not replayed twice"
            ) from None


# What is told


def _print_plan(request: Request, found: Survey, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": request.topic.name,
                "dry_run": True,
                "would_replay": found.total,
                "to": [
                    {"topic": route.topic, "group": route.group, "letters": count}
                    for route, count in sorted(found.routes.items())
                ],
                **_left_document(found),
            }
        )
        return
    if found.routes:
        rows = ([route.topic, route.group, count] for route, count in sorted(found.routes.items()))
        print_table(["to", "for group", "letters"], rows)
    note(f"{plural(found.total, 'letter')} would be replayed")
    _tell_left(found)


def _print_outcome(request: Request, found: Survey, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": request.topic.name,
                "replay": request.id,
                "replayed": outcome.replayed,
                "refused": outcome.refused,
                "stopped": outcome.is_stopped,
                **_left_document(found),
            }
        )
    else:
        note(f"{plural(outcome.replayed, 'letter')} of {request.topic.name} replayed")
        _tell_left(found)
        quicker = outcome.done_before - found.done.total()
        if quicker > 0:
            note(f"{plural(quicker, 'letter')} left out: somebody else was quicker")
    for refusal in outcome.refusals:
        note(f"{refusal.entry.letter.spot} was not taken, and still waits: {refusal.reason}")
    if outcome.refused > len(outcome.refusals):
        note(f"{outcome.refused - len(outcome.refusals)} more were not taken")
    if outcome.is_stopped:
        note("stopped; run it again to go on")


def _left_document(found: Survey) -> dict[str, Any]:
    return {
        "done_before": found.done.total(),
        "done": {state.value: found.done[state] for state in State},
        "left_out": {each.name.lower(): count for each, count in found.left.items()},
    }


def _tell_left(found: Survey) -> None:
    if found.done:
        told = ", ".join(f"{count} {state.value}" for state, count in sorted(found.done.items()))
        note(f"{plural(found.done.total(), 'letter')} left out, done with before: {told}")
    for why, count in found.left.items():
        note(f"{plural(count, 'letter')} left out: they {why.value}")
