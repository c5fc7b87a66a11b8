"""The vote that a crash must not forget: Kafka's `quorum-state` file in the folder of the metadata log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final
from uuid import UUID

from penstock.log.checkpoints import replace_durably
from penstock.log.identity import parse_uuid, uuid_text
from penstock.raft.values import NOBODY, Election, ReplicaKey

NAME: Final = "quorum-state"
_VERSION: Final = 1
_NO_DIRECTORY: Final = UUID(int=0)


class DamagedElection(Exception):
    """Nobody can tell how this node has voted, so it must not vote again."""


def save(folder: Path, election: Election) -> None:
    """Blocking; durable when it returns. Raises OSError."""
    voted = election.voted
    document = {
        "leaderId": election.leader_id,
        "leaderEpoch": election.epoch,
        "votedId": NOBODY if voted is None else voted.id,
        "votedDirectoryId": uuid_text((voted and voted.directory) or _NO_DIRECTORY),
        "data_version": _VERSION,
    }
    replace_durably(folder / NAME, json.dumps(document, separators=(",", ":")).encode())


def load(folder: Path) -> Election | None:
    """None when there is none yet. Raises DamagedElection."""
    path = folder / NAME
    try:
        document = json.loads(path.read_text())
        return _election(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedElection(f"{path} cannot be understood: {error}") from None


def _election(document: dict[str, object]) -> Election:
    if document["data_version"] not in (0, _VERSION):
        raise ValueError(f"version {document['data_version']}")
    epoch, leader, voted = (int(str(document[name])) for name in ("leaderEpoch", "leaderId", "votedId"))
    directory = parse_uuid(str(document["votedDirectoryId"])) if "votedDirectoryId" in document else None
    if directory == _NO_DIRECTORY:
        directory = None
    return Election(epoch, leader, None if voted == NOBODY else ReplicaKey(voted, directory))
