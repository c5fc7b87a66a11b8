"""Who has been heard of lately. Soft state of the active controller: a new one starts it afresh."""

from typing import Final

from penstock.cluster.image import ClusterImage

#: A broker that lives has this long to report over a new connection, however often it does otherwise.
_RECONNECT_MS_MIN: Final = 1000


class _Session:
    __slots__ = ("cut_ms", "epoch", "handed_over_at", "heard_ms", "metadata_offset")

    def __init__(self, epoch: int, heard_ms: int, metadata_offset: int = -1) -> None:
        self.epoch = epoch
        self.heard_ms = heard_ms
        self.metadata_offset = metadata_offset
        #: When it ends although it was heard of lately, because the connection that it was heard over has closed.
        self.cut_ms: int | None = None
        #: Where the metadata was when this broker was found to have handed everything over.
        self.handed_over_at: int | None = None

    def __repr__(self) -> str:
        return f"<epoch {self.epoch}, heard at {self.heard_ms} ms>"

    def ends_ms(self, timeout_ms: int) -> int:
        silent = self.heard_ms + timeout_ms
        return silent if self.cut_ms is None else min(silent, self.cut_ms)


class BrokerSessions:
    """Brokers that are silent for longer than the session timeout are to be fenced."""

    __slots__ = ("_fetch_timeout_ms", "_reconnect_ms", "_sessions", "_timeout_ms")

    def __init__(
        self, *, session_timeout_ms: int, fetch_timeout_ms: int = 0, heartbeat_interval_ms: int = 0
    ) -> None:
        self._timeout_ms = session_timeout_ms
        self._reconnect_ms = max(2 * heartbeat_interval_ms, _RECONNECT_MS_MIN)
        self._fetch_timeout_ms = fetch_timeout_ms
        self._sessions: dict[int, _Session] = {}

    def __repr__(self) -> str:
        return f"<BrokerSessions {self._sessions}>"

    def elected(self, image: ClusterImage, now_ms: int, deposed: int | None = None) -> None:
        """Everyone gets a fresh session; the leader before us has been silent for as long as it took to
        depose it."""
        self._sessions.clear()
        for broker in image.brokers.values():
            silent_ms = self._fetch_timeout_ms if broker.id == deposed else 0
            self._sessions[broker.id] = _Session(broker.epoch, now_ms - silent_ms)

    def contacted(self, broker: int, epoch: int, now_ms: int, *, metadata_offset: int = -1) -> None:
        """`metadata_offset` is the last one that the broker has applied. An earlier epoch's word is ignored."""
        session = self._sessions.get(broker)
        if session is None or session.epoch < epoch:
            self._sessions[broker] = _Session(epoch, now_ms, metadata_offset)
        elif session.epoch == epoch:
            session.heard_ms = max(session.heard_ms, now_ms)
            session.cut_ms = None
            session.metadata_offset = max(session.metadata_offset, metadata_offset)

    def connection_lost(self, broker: int, epoch: int, now_ms: int) -> None:
        """The connection over which it reports has closed: its process has probably ended.

        One that lives reports over another within two heartbeats, so it is not waited for any longer.
        """
        session = self._sessions.get(broker)
        if session is not None and session.epoch == epoch and session.cut_ms is None:
            session.cut_ms = now_ms + self._reconnect_ms

    def expired(self, image: ClusterImage, now_ms: int) -> list[int]:
        """Unfenced brokers that have been silent for too long. One without a session gets one now."""
        self._follow(image, now_ms)
        return [
            broker.id
            for broker in image.brokers.values()
            if not broker.fenced and self._has_expired(broker.id, now_ms)
        ]

    def silent_ms(self, broker: int, now_ms: int) -> int:
        """0 for a broker that has no session: nothing is known of its silence."""
        session = self._sessions.get(broker)
        return 0 if session is None else now_ms - session.heard_ms

    def next_deadline_ms(self) -> int | None:
        """When the next session may expire; fenced brokers count too, which costs a look."""
        return min((s.ends_ms(self._timeout_ms) for s in self._sessions.values()), default=None)

    def handed_over(self, broker: int, offset: int) -> int:
        """Remembers the first offset at which the broker led nothing any more."""
        session = self._sessions.get(broker)
        if session is None:
            return offset
        if session.handed_over_at is None:
            session.handed_over_at = offset
        return session.handed_over_at

    def all_have_seen(self, image: ClusterImage, offset: int) -> bool:
        """Whether every active broker has applied the metadata up to this offset."""
        return all(
            broker.id in self._sessions and self._sessions[broker.id].metadata_offset >= offset
            for broker in image.active_brokers()
        )

    def _has_expired(self, broker: int, now_ms: int) -> bool:
        return now_ms >= self._sessions[broker].ends_ms(self._timeout_ms)

    def _follow(self, image: ClusterImage, now_ms: int) -> None:
        for broker in image.brokers.values():
            self._begin_if_new(broker.id, broker.epoch, now_ms)
        for gone in self._sessions.keys() - image.brokers.keys():
            del self._sessions[gone]

    def _begin_if_new(self, broker: int, epoch: int, now_ms: int) -> None:
        session = self._sessions.get(broker)
        if session is None or session.epoch < epoch:
            self._sessions[broker] = _Session(epoch, now_ms)
