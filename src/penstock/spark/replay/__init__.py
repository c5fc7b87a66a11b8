"""Replay: records of a topic, an archive or dead letters go to a topic again, each record once, at a bounded rate."""

from __future__ import annotations

from penstock.spark.replay.job import Replay
from penstock.spark.replay.request import ReplayError, ReplayJobRequest, parse_request

__all__ = ["Replay", "ReplayError", "ReplayJobRequest", "replay"]


def replay(
    *,
    from_: str = "",
    topic: str = "",
    archive: str = "",
    letters: str = "",
    to: str = "",
    where: str = "",
    starting: str = "earliest",
    ending: str = "latest",
    since: str = "",
    until: str = "",
    times: str = "now",
    rate: str = "",
    id: str = "",
) -> Replay:
    """From a topic, an archive or dead letters (`from` tells them apart by how they look) to a topic.

    A replay that is run again with the same settings, or the same `id`, goes on where it was left. The order of
    records is kept within each partition that they come from. Raises ReplayError.
    """
    request = parse_request(
        from_=from_,
        topic=topic,
        archive=archive,
        letters=letters,
        to=to,
        where=where,
        starting=starting,
        ending=ending,
        since=since,
        until=until,
        times=times,
        rate=rate,
        id=id,
    )
    return Replay(request=request)
