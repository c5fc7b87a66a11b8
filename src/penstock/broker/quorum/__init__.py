"""The metadata quorum on this node: runs the raft core with real files, sockets and timers."""

from penstock.broker.quorum.quorum import Quorum

__all__ = ("Quorum",)
