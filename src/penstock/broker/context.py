"""What a handler knows about the request it serves besides the message itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.node import Node


class RequestContext(NamedTuple):
    node: Node
    api_key: int
    version: int
    client_id: str | None
    client_host: str
    listener: str
    #: None where the node asks itself, or asks on behalf of a client.
    connection: Connection | None = None
