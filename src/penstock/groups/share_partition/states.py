"""The states of a record in a share partition, one byte each, and the tables that move many of them at once.

A record whose new state is not stored yet is neither with a member nor available: it has the code of its new state
with QUEUED, and with LAUNCHED too once a write that contains it is under way.
"""

import re
from typing import Final

from penstock.groups.share_state import values

AVAILABLE: Final = 0
ACQUIRED: Final = 1
ACKNOWLEDGED: Final = 2
#: With a member, and final already: nobody gets it again, whatever the member does.
HANDED: Final = 3
ARCHIVED: Final = 4
#: Available once its time has come.
DELAYED: Final = 5
#: Final already, and with nobody yet: may be handed out, once, without another write.
PAID: Final = 6

QUEUED: Final = 0x10
LAUNCHED: Final = 0x40
#: As ARCHIVED, and to be buried in the dead-letter topic.
LIMIT: Final = values.BURIED_LIMIT
REJECTED: Final = values.BURIED_REJECTED
EXPIRED: Final = values.BURIED_LOCK_EXPIRED

_TARGETS: Final = (AVAILABLE, ACKNOWLEDGED, ARCHIVED, DELAYED, PAID, LIMIT, REJECTED, EXPIRED)
_STORED_AS: Final = {DELAYED: AVAILABLE, PAID: ACKNOWLEDGED}
_SETTLED_AS: Final = {LIMIT: ARCHIVED, REJECTED: ARCHIVED, EXPIRED: ARCHIVED}
#: In a row of stored states: nothing to write here.
NOT_STORED: Final = 255


def code_table(changes: dict[int, int], default: int | None = None) -> bytes:
    """Translates some codes, and leaves the others as they are or makes them one."""
    return bytes(changes.get(code, code if default is None else default) for code in range(256))


_WAITING = {target | bits: target for target in _TARGETS for bits in (QUEUED, QUEUED | LAUNCHED)}
#: A write is on its way.
LAUNCH: Final = code_table({target | QUEUED: target | QUEUED | LAUNCHED for target in _TARGETS})
#: A write has arrived.
SETTLE: Final = code_table(
    {target | QUEUED | LAUNCHED: _SETTLED_AS.get(target, target) for target in _TARGETS}
)
#: What a write says of a record, as a place in STORED_STATES.
STORED_STATES: Final = (AVAILABLE, ACKNOWLEDGED, ARCHIVED, LIMIT, REJECTED, EXPIRED)
STORED: Final = code_table(
    {code: STORED_STATES.index(_STORED_AS.get(target, target)) for code, target in _WAITING.items()},
    default=NOT_STORED,
)
#: Offsets at which the log has nothing to hand out, or nothing any more.
HOLE: Final = code_table({AVAILABLE: ARCHIVED, DELAYED: ARCHIVED, PAID: ARCHIVED})
ONE_MORE_DELIVERY: Final = bytes(min(count + 1, 255) for count in range(256))


def _one_of(*codes: int) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % code for code in codes) + b"]"


#: The same byte again and again.
RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)
#: The same, for `findall`: whole runs, and the byte of each.
RUNS: Final = re.compile(rb"((.)\2*)", re.DOTALL)
_STORED_FINAL = (ACKNOWLEDGED, ARCHIVED)
#: From the start: what the window need not keep.
DONE: Final = re.compile(_one_of(*_STORED_FINAL) + b"*")
#: From the start: what the stored state need not keep, once what is queued has been written.
DONE_ONCE_WRITTEN: Final = re.compile(
    _one_of(
        *_STORED_FINAL,
        HANDED,
        PAID,
        *(code for code, target in _WAITING.items() if target in (ACKNOWLEDGED, ARCHIVED, PAID)),
    )
    + b"*"
)
WAITING: Final = re.compile(_one_of(*_WAITING))
IN_HANDS: Final = re.compile(_one_of(ACQUIRED, HANDED) + b"+")
TIMED: Final = re.compile(_one_of(ACQUIRED, HANDED, DELAYED) + b"+")
#: Its time means something, or will once it is stored.
HAS_TIME: Final = re.compile(
    _one_of(ACQUIRED, HANDED, DELAYED, *(code for code, target in _WAITING.items() if target == DELAYED))
)
#: Neither available nor final nor nothing: why a partition cannot be forgotten yet.
BUSY: Final = re.compile(_one_of(ACQUIRED, HANDED, PAID, *_WAITING))
#: What does not count as a lock.
FINAL_CODES: Final = bytes(_STORED_FINAL)
#: What is final once everything queued has been written.
FINAL_ONCE_WRITTEN: Final = bytes(
    (
        *_STORED_FINAL,
        HANDED,
        PAID,
        *(code for code, target in _WAITING.items() if target not in (AVAILABLE, DELAYED)),
    )
)
