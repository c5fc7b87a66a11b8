"""Another process that leads the quorum under this node's id: only one of an id may take part."""


class Namesake:
    """A leader that lost its disk and came back is told of itself too, until the others have elected another."""

    def __init__(self, own_id: int, *, patience_ms: int) -> None:
        self._own_id = own_id
        self._patience_ms = patience_ms
        self._since_ms: int | None = None

    def is_alive(self, leader_id: int, now_ms: int) -> bool:
        """`leader_id` is who leads by a peer's word, told to a node that does not lead."""
        if leader_id >= 0 and leader_id != self._own_id:
            self._since_ms = None
        elif leader_id == self._own_id and self._since_ms is None:
            self._since_ms = now_ms
        return self._since_ms is not None and now_ms - self._since_ms > self._patience_ms
