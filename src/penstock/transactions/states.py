"""The life of a transactional id as one table: what is absent from it cannot happen."""

from enum import Enum
from typing import Final


class State(Enum):
    """Numbered as Kafka stores them and named as it prints them."""

    EMPTY = 0, "Empty"
    ONGOING = 1, "Ongoing"
    PREPARE_COMMIT = 2, "PrepareCommit"
    PREPARE_ABORT = 3, "PrepareAbort"
    COMPLETE_COMMIT = 4, "CompleteCommit"
    COMPLETE_ABORT = 5, "CompleteAbort"
    #: These two are never stored: an id that expires is gone, and one that is fenced is aborted, in one step.
    DEAD = 6, "Dead"
    PREPARE_EPOCH_FENCE = 7, "PrepareEpochFence"

    def __init__(self, code: int, title: str) -> None:
        self.code = code
        self.title = title
        #: Decided, but not all markers are known to be written.
        self.is_prepared = code in (2, 3)
        self.is_complete = code in (4, 5)
        self.is_committed = code in (2, 4)

    def __repr__(self) -> str:
        return self.title


STORED_STATES: Final = tuple(state for state in State if state.code < State.DEAD.code)
BY_CODE: Final = {state.code: state for state in State}
BY_TITLE: Final = {state.title: state for state in State}

#: Between transactions; a complete one becomes empty when a producer takes the id over.
_RESTS: Final = frozenset({State.EMPTY, State.ONGOING, State.COMPLETE_ABORT, State.DEAD})

TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.EMPTY: _RESTS,
    State.ONGOING: frozenset({State.ONGOING, State.PREPARE_COMMIT, State.PREPARE_ABORT}),
    State.PREPARE_COMMIT: frozenset({State.COMPLETE_COMMIT}),
    State.PREPARE_ABORT: frozenset({State.COMPLETE_ABORT}),
    # The abort of a transaction that nothing was added to has no markers to write: it is complete at once.
    State.COMPLETE_COMMIT: _RESTS,
    State.COMPLETE_ABORT: _RESTS,
}
