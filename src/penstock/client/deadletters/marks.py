"""What the list of letters that are done with says of each. Pure.

A record of the list has the letter's place as its key. Whoever reads the list goes by the keys: what stands there is
not to be published any more, for whatever reason.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.deadletters.letter import Spot, parse_spot
from penstock.client.letters import replayed_key

AT: Final = "at"
REPLAY: Final = "replay"
TO: Final = "to"
TOPIC_ID: Final = "topicId"
STATE: Final = "state"


class State(StrEnum):
    #: It was published again. What names no state is this, as replays on Spark write it.
    REPLAYED = "replayed"
    #: A corrected one took its place.
    EDITED = "edited"
    #: Nobody wants it any more.
    PURGED = "purged"


class Mark(NamedTuple):
    state: State
    at_ms: int | None = None
    #: By which the replay is known that did it.
    replay: str | None = None
    #: The topic that the record went to.
    to: str | None = None


def key_of(spot: Spot) -> bytes:
    return replayed_key(*spot)


def value_of(mark: Mark, topic_id: UUID | None) -> bytes:
    told = {
        AT: mark.at_ms,
        REPLAY: mark.replay,
        TO: mark.to,
        TOPIC_ID: None if topic_id is None else str(topic_id),
        STATE: mark.state.value,
    }
    return json.dumps({name: value for name, value in told.items() if value is not None}).encode()


def read_mark(key: bytes | None, value: bytes | None, topic_id: UUID | None) -> tuple[Spot, Mark] | None:
    """None for what is about an earlier topic of the same name, or about nothing at all."""
    spot = parse_spot((key or b"").decode(errors="replace"))
    told = _document(value)
    is_other = topic_id is not None and told.get(TOPIC_ID) not in (None, str(topic_id))
    if spot is None or is_other:
        return None
    return spot, Mark(_state(told), _kind(told, AT, int), _kind(told, REPLAY, str), _kind(told, TO, str))


def _document(value: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(value or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _state(told: dict[str, Any]) -> State:
    try:
        return State(told.get(STATE, State.REPLAYED))
    except ValueError:
        return State.REPLAYED  # of a later version: done with it is in any case


def _kind(told: dict[str, Any], name: str, kind: type) -> Any:
    found = told.get(name)
    return found if isinstance(found, kind) else None
