"""Replay: writes records of a topic, an archive or dead letters to a topic again, each once, at a limited rate."""

from __future__ import annotations

from functools import wraps

from penstock.spark.replay.job import Replay
from penstock.spark.replay.request import ReplayError, ReplayJobRequest, parse_request

__all__ = ["Replay", "ReplayError", "ReplayJobRequest", "replay"]


@wraps(parse_request, assigned=())
def replay(**settings: str) -> Replay:
    """Return the job that replays a topic, an archive or dead letters (`from_` accepts all three) to a topic.

    Takes the settings of `parse_request`. A replay that runs again with the same settings, or the same `id`, continues
    where it stopped. Records of a partition stay in order. Raises ReplayError.
    """
    return Replay(request=parse_request(**settings))
