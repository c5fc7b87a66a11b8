"""W3C trace context in headers of messages: `traceparent` and `tracestate`, read strictly and handed on.

Headers are text that anyone may have written: what is no trace context is taken for absent, never half believed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.client.letters import Header

__all__ = ["TRACEPARENT", "TRACESTATE", "Trace", "headers_of", "incoming", "outgoing"]

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
STATE_CHARACTERS_MAX: Final = 512
SAMPLED: Final = 0x01
#: Sampled, and that the id of the trace is random; what else may be set one day is not ours to hand on.
_FLAGS_KNOWN: Final = 0x03
#: Versions to come may have more behind a further hyphen.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII,
)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_STATE: Final = re.compile(r"[\x20-\x7e\t]*", re.ASCII)

_CHANCE: Final = random.Random()
# Two processes that were one must not go on with the same ids.
os.register_at_fork(after_in_child=_CHANCE.seed)


class Trace(NamedTuple):
    """A place in a trace: where it is to be continued from."""

    trace_id: str
    span_id: str
    flags: int
    #: What vendors of tracing have to tell each other, as it came.
    state: str


def incoming(headers: Iterable[Header] | None) -> Trace | None:
    """As the headers of a message tell; None where they tell none that is valid."""
    parent: bytes | None = None
    states: list[bytes] = []
    for name, value in headers or ():
        if name == TRACEPARENT:
            parent = value
        elif name == TRACESTATE and value:
            states.append(value)
    return _parsed(parent, states) if parent is not None else None


def outgoing(
    headers: list[Header], current: Trace | None, *, chance: random.Random | None = None
) -> list[Header]:
    """With a child of `current`, or the beginning of a trace, unless the headers have a trace context of their own.

    A trace that begins here is told as sampled: nobody further on who records is told not to.
    """
    for name, _ in headers:
        if name == TRACEPARENT:
            return headers
    chance = chance or _CHANCE
    if current is None:
        return [*headers, (TRACEPARENT, _beginning(chance))]
    return [*headers, *headers_of(current, chance.getrandbits(64) or 1)]


def headers_of(trace: Trace, child: int | None = None) -> list[Header]:
    """Of the place itself, or of a child of it by its id."""
    span_id = trace.span_id if child is None else f"{child:016x}"
    parent = f"00-{trace.trace_id}-{span_id}-{trace.flags & _FLAGS_KNOWN:02x}"
    told: list[Header] = [(TRACEPARENT, parent.encode())]
    return [*told, (TRACESTATE, trace.state.encode())] if trace.state else told


def _beginning(chance: random.Random) -> bytes:
    return b"00-%032x-%016x-%02x" % (chance.getrandbits(128) or 1, chance.getrandbits(64) or 1, SAMPLED)


def _parsed(parent: bytes, states: list[bytes]) -> Trace | None:
    match = _TRACEPARENT.fullmatch(parent.decode("latin-1"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return Trace(trace_id, span_id, int(flags, 16), _state(states) if states else "")


def _state(states: list[bytes]) -> str:
    """As it came; what is too long loses entries at its end, which are the oldest."""
    text = ",".join(state.decode("latin-1") for state in states)
    if _STATE.fullmatch(text) is None:
        return ""
    if len(text) <= STATE_CHARACTERS_MAX:
        return text
    return text[: STATE_CHARACTERS_MAX + 1].rpartition(",")[0]
