"""What members of a group wrote down, as times of ownership."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FOREVER = float("inf")


class Entry(NamedTuple):
    time_s: float
    process: int
    member: str
    event: str
    detail: Any


class Freeze(NamedTuple):
    """A process that stood still; it may have been fenced meanwhile, and cannot know that."""

    process: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Tenure:
    """One partition with one member, as the member saw it."""

    partition: int
    member: str
    process: int
    start_s: float
    end_s: float = FOREVER
    ending: str = ""  # revoked, lost or killed


class Commit(NamedTuple):
    member: str
    partition: int
    offset: int
    asked_s: float
    done_s: float


class Reading(NamedTuple):
    member: str
    partition: int
    offset: int
    time_s: float


@dataclass(slots=True)
class Told:
    """All that members said: tenures by partition in order of their start, kept commits, and records read."""

    tenures: dict[int, list[Tenure]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> Iterator[Entry]:
    for line in path.read_text().splitlines():
        try:
            yield Entry(*json.loads(line))
        except ValueError:
            continue  # the kill tore it


def digest(entries: Iterable[Entry], killed_s: dict[int, float]) -> Told:
    """`entries` in any order; `killed_s` are the times at which processes were killed."""
    told = Told()
    held: dict[tuple[str, int], Tenure] = {}
    asked_s: dict[str, float] = {}
    for entry in sorted(entries, key=lambda entry: entry.time_s):
        match entry.event:
            case "assigned":
                for partition in entry.detail:
                    tenure = Tenure(partition, entry.member, entry.process, entry.time_s)
                    held[entry.member, partition] = tenure
                    told.tenures.setdefault(partition, []).append(tenure)
            case "revoked" | "lost":
                for partition in entry.detail:
                    _end(held.pop((entry.member, partition), None), entry.time_s, entry.event)
            case "read":
                told.readings += [
                    Reading(entry.member, number, offset, entry.time_s) for number, offset in entry.detail
                ]
            case "commit":
                asked_s[entry.member] = entry.time_s
            case "committed":
                began = asked_s[entry.member]
                told.commits += [
                    Commit(entry.member, number, offset, began, entry.time_s)
                    for number, offset in entry.detail
                ]
            case "refused":
                told.refusals[entry.detail[1]] = told.refusals.get(entry.detail[1], 0) + 1
    for tenure in held.values():
        if tenure.process in killed_s:
            _end(tenure, killed_s[tenure.process], "killed")
    return told


def _end(tenure: Tenure | None, time_s: float, how: str) -> None:
    if tenure is not None:
        tenure.end_s, tenure.ending = time_s, how
