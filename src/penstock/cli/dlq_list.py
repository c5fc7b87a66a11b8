"""`penstock dlq list` and `show`: letters found by topic, by group, and one by its place."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from penstock.cli.dlq_topics import no_letters
from penstock.cli.dlq_view import (
    Seen,
    print_json_lines,
    print_letters,
    print_summaries,
    summary_document,
)
from penstock.cli.failure import Failure
from penstock.cli.output import note, plural, print_json
from penstock.client.cluster import Cluster
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.letter import Spot
from penstock.client.deadletters.reading import letter_at, letters, read_marks, spans
from penstock.client.deadletters.surveys import summarise
from penstock.client.deadletters.topics import NoLetters, find_topic, letter_topics
from penstock.client.metadata import TopicInfo


def print_topics(cluster: Cluster, wanted: Filter, *, only_waiting: bool, as_json: bool) -> None:
    found = [summarise(cluster, topic, wanted) for topic in letter_topics(cluster).values()]
    if not wanted.is_empty:
        found = [each for each in found if each.total]
    if only_waiting:
        found = [each for each in found if each.waiting]
    if as_json:
        print_json([summary_document(each) for each in found])
    elif found:
        print_summaries(found)
    else:
        note("no dead letters" + (" like that" if only_waiting or not wanted.is_empty else " yet"))


def print_found(
    cluster: Cluster,
    names: Sequence[str],
    wanted: Filter,
    *,
    only_waiting: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    chosen = _chosen(cluster, names, wanted)
    found = _seen(cluster, chosen, only_waiting=only_waiting)
    if as_json:
        print_json_lines(islice(found, limit))
        return
    assert limit is not None
    count = print_letters(found, limit=limit, with_topic=len({topic.name for topic, _ in chosen}) > 1)
    if not count:
        note("no letters like that" if only_waiting or not wanted.is_empty else "no letters")
    elif count > limit:
        note(f"{plural(count - limit, 'letter')} more: --limit {count} shows all")


def _chosen(cluster: Cluster, names: Sequence[str], wanted: Filter) -> list[tuple[TopicInfo, Filter]]:
    """What is no topic may be a group, whose letters can be anywhere."""
    chosen: list[tuple[TopicInfo, Filter]] = []
    for name in names:
        try:
            chosen.append((find_topic(cluster, name), wanted))
        except NoLetters as error:
            of_group = _of_group(cluster, name, wanted)
            if not of_group:
                raise no_letters(error) from None
            chosen += of_group
    return chosen


def _of_group(cluster: Cluster, group: str, wanted: Filter) -> list[tuple[TopicInfo, Filter]]:
    narrowed = replace(wanted, groups=(group,))
    return [
        (topic, narrowed)
        for topic in letter_topics(cluster).values()
        if summarise(cluster, topic, Filter(groups=(group,))).total
    ]


def _seen(
    cluster: Cluster, chosen: Sequence[tuple[TopicInfo, Filter]], *, only_waiting: bool
) -> Iterator[Seen]:
    for topic, wanted in chosen:
        there = spans(cluster, topic)
        done = read_marks(cluster, topic, there, is_settled=False)
        for letter in letters(cluster, topic, there):
            mark = done.get(letter.spot)
            if wanted.matches(letter) and not (only_waiting and mark is not None):
                yield Seen(letter, mark)


def find_seen(cluster: Cluster, topic: TopicInfo, spot: Spot) -> Seen:
    letter = letter_at(cluster, topic, spot)
    if letter is None:
        raise Failure(
            f"{topic.name} has no letter at {spot}", hint=f"penstock dlq list {topic.name} shows all"
        )
    done = read_marks(cluster, topic, spans(cluster, topic), is_settled=False)
    return Seen(letter, done.get(spot))
