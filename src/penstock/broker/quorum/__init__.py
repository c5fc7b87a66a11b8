"""The quorum loop: the pure raft core, carried out with real files, sockets and timers."""

from penstock.broker.quorum.member import Quorum

__all__ = ("Quorum",)
