"""`penstock dlq purge`: what is going to be given up and deleted, the user's word for it, and what was done."""

from penstock.cli.dlq_topics import new_id, turn_of
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.output import confirm, note, plural, print_json
from penstock.client.cluster import Cluster
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.purging import Plan, Purged, plan, purge, purge_all
from penstock.client.deadletters.topics import holds_letters
from penstock.client.metadata import TopicInfo


def purge_letters(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: Filter,
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    if everything:
        _refuse_all(topic, wanted)
    # Without any filter nothing is given up: what is done with is deleted.
    chosen = Filter() if everything else None if wanted.is_empty else wanted
    found = plan(cluster, topic, chosen)
    if dry_run:
        _tell_plan(topic, found, as_json=as_json)
        return
    done = Purged()
    if not found.is_nothing:
        confirm(_question(topic, found), yes=yes)
        done = (
            purge_all(cluster, topic)
            if everything
            else purge(cluster, topic, chosen, turn_of(cluster, topic), id=new_id())
        )
    _tell(topic, found, done, everything=everything, as_json=as_json)


def _refuse_all(topic: TopicInfo, wanted: Filter) -> None:
    if not wanted.is_empty:
        raise Failure("--all does not go with filters", exit_code=WRONG_USAGE)
    if not holds_letters(topic.name):
        raise Failure(
            f"{topic.name} may hold more than dead letters, by its name: --all is for topics that end in .dlq",
            exit_code=WRONG_USAGE,
        )


def _question(topic: TopicInfo, found: Plan) -> str:
    parts = []
    if found.chosen:
        parts.append(f"give up {plural(found.chosen, 'letter')} that were not replayed")
    if found.deletable:
        parts.append(f"delete {plural(found.deletable, 'letter')} for good")
    return f"{topic.name}: {', and '.join(parts)}?"


def _tell_plan(topic: TopicInfo, found: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": topic.name,
                "dry_run": True,
                "would_give_up": found.chosen,
                "would_delete": found.deletable,
                "still_waiting": found.kept,
            }
        )
        return
    note(
        f"{plural(found.chosen, 'letter')} would be given up, {found.deletable} deleted; {found.kept} would still wait"
    )


def _tell(topic: TopicInfo, found: Plan, done: Purged, *, everything: bool, as_json: bool) -> None:
    given_up = found.chosen if everything else done.given_up
    if as_json:
        print_json(
            {
                "topic": topic.name,
                "given_up": given_up,
                "deleted": done.deleted,
                "still_waiting": found.kept,
                "beginnings": {str(index): offset for index, offset in done.beginnings.items()},
            }
        )
        return
    note(f"{topic.name}: {plural(given_up, 'letter')} given up, {done.deleted} deleted")
    if found.kept:
        note(
            f"waiting still: {plural(found.kept, 'letter')}; what is done with behind the first of them stays"
        )
