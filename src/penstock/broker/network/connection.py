"""One connection of a client: receives request frames, and sends the replies in the order of the requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final, Protocol, cast

from penstock.broker.network.apis import PRODUCE, Api
from penstock.broker.network.frame_buffers import PartialFrame
from penstock.broker.network.tls import HANDSHAKE_FAILURE_ALERT, TlsLayer
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame
from penstock.security.principal import ANONYMOUS, Principal

if TYPE_CHECKING:
    from penstock.broker.network.node_principals import NodePrincipals
    from penstock.broker.network.server import Server
    from penstock.broker.network.tenants import TenantOnNode
    from penstock.broker.network.time_accounts import TimeAccount
    from penstock.security.authorizer import Decisions
    from penstock.security.quotas import Meter, Reservation

logger = logging.getLogger("penstock.server")

Reply = bytes | bytearray | list[BytesLike] | None
#: Stands in for a reply: closes the connection after all earlier replies were sent.
CLOSE_CONNECTION: Final = bytearray()
_SIZE = struct.Struct(">i")
#: The size of api key, version and correlation id, which every request has.
_FRAME_BYTES_MIN = 8
#: Bounds of the replies that are held back while frames are handled. More or larger replies are sent at once, so that a
#: slow reader is noticed before the next frame.
_CORKED_REPLIES_MAX = 64
_CORKED_REPLY_BYTES_MAX = 4096
#: The poll event by which Linux reports that a peer has closed its side, even if there are still unread bytes.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
#: How many unsent bytes of large replies to pipelined requests the kernel holds before this connection has to wait.
_UNSENT_BYTES_MAX = 64 << 10
_EMPTY = memoryview(bytearray())
_PRODUCE_KEY_BYTES = struct.pack(">h", PRODUCE)  # the first bytes of a Produce frame
#: The first bytes of a client that speaks TLS: a handshake record of version 3.
_TLS_HANDSHAKE = 0x1603
_numbers = itertools.count(1)


class Postponed(Exception):
    """The request has had no effect yet; it is handled once the connection is no longer throttled."""


class PendingReply:
    """A reply that comes later; replies to later requests wait for it.

    `on_lost` is called if the connection ends first.
    """

    __slots__ = ("api_key", "done", "held_bytes", "on_lost", "reply", "started")

    def __init__(self, api_key: int) -> None:
        self.api_key = api_key
        self.started = perf_counter()
        self.done = False
        self.reply: Reply = None
        self.held_bytes = 0  # of a reply that is ready but waits for earlier replies
        self.on_lost: Callable[[], object] | None = None

    def cancel_if_lost(self, task: asyncio.Task[None]) -> None:
        """Cancel the task that makes the reply if the connection ends first, but not before the task has begun.

        A task that never begins leaves behind coroutines that it would have awaited, and Python warns about each.
        """
        self.on_lost = lambda: task.get_loop().call_soon(task.cancel)


class Authentication(Protocol):
    """The SASL exchange of a connection; times are milliseconds since 1970."""

    def is_complete(self, now_ms: int) -> bool:
        """Whether the client has authenticated, and its session has not expired."""
        ...

    def must_reauthenticate(self, now_ms: int) -> bool:
        """Whether the session of a client that had authenticated has expired (KIP-368)."""
        ...

    @property
    def is_by_token(self) -> bool:
        """Whether the last login was by a delegation token."""
        ...


class Connection(asyncio.BufferedProtocol):
    __slots__ = (
        "_backlog", "_closing", "_corked", "_follows_rules", "_frame_began", "_held_by", "_holds", "_is_expensive",
        "_is_pipelining", "_is_queued", "_muted", "_muted_at", "_partial", "_slots", "_throttle", "_transport",
        "_write_paused", "account",
        "authentication", "client_host", "decisions", "frame_bytes_max", "is_inter_broker", "last_active",
        "listener", "meters", "nodes", "number",
        "on_lost",
        "peer", "principal", "server", "session_end", "software", "tenant",
        "turns",
    )  # fmt: skip

    def __init__(self, server: Server, listener: str, *, nodes: NodePrincipals | None = None) -> None:
        self.server = server
        self.listener = listener
        self.nodes = nodes  # None on listeners for clients
        #: Whether the client is a node; on a listener that authenticates, only once it has proven who it is.
        self.is_inter_broker = nodes is not None and not nodes.authenticates
        #: Whether access rules may make the client a node.
        self._follows_rules = nodes is not None and nodes.follows_rules
        self.number = next(_numbers)  # in the order in which connections arrive
        self.client_host = self.peer = "?"
        self.principal: Principal = ANONYMOUS
        self.decisions: Decisions | None = None  # what the principal may do, as far as it was asked
        self.tenant: TenantOnNode | None = None  # to which the principal belongs
        self.account: TimeAccount | None = None  # of the time of the event loop; None for a node
        #: By kind of quota: what has counted the last request, unless the client belongs to a tenant.
        self.meters: dict[str, Meter] = {}
        #: By kind of quota, once the connection has had its first turn or waits for it: what is reserved for that turn.
        self.turns: dict[str, Sequence[Reservation]] = {}
        self.authentication: Authentication | None = None  # None if the listener asks for none
        #: Until then no request needs to ask `authentication`; seconds as `perf_counter` has them.
        self.session_end = 0.0
        self.frame_bytes_max = server.frame_bytes_max  # less before the client has authenticated
        self.software = ("", "")  # name and version of the client library, from its ApiVersions request
        self.last_active = 0.0
        self._transport: asyncio.Transport | None = None
        self._slots: deque[PendingReply] = deque()
        self._partial: PartialFrame | None = None
        # When a partial frame's first byte arrived, plus the time that reading was paused; 0 without such a frame.
        self._frame_began = 0.0
        self._backlog = _EMPTY  # received frames that wait, in a buffer that this connection owns
        self._corked: list[BytesLike] | None = None  # replies held back while frames are handled
        self._muted = self._write_paused = self._closing = False
        self._muted_at = 0.0
        self._throttle: asyncio.TimerHandle | None = None  # no requests are handled before it
        self._held_by: PendingReply | None = None  # no further requests are handled before this reply
        self._holds = 0  # how often it is held
        self._is_pipelining = False  # the request being handled arrived together with an earlier one
        self._is_queued = False  # waits in the server's queue
        self._is_expensive = False  # the next request is queued: the last one took long, or others come first
        #: Called when the connection has ended, no matter which side closed it.
        self.on_lost: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.peer} on {self.listener}, {len(self._slots)} waiting>"

    # -- life cycle ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            self.client_host, self.peer = address[0], f"{address[0]}:{address[1]}"
        self.last_active = self.server.clock()
        self.server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._throttle is not None:
            self._throttle.cancel()
            self._throttle = None
        self._leave()
        if self._partial is not None:
            self.server.buffers.end(self._partial)
            self._partial = None
        self._drop_backlog()
        self._forget_turns()
        self.server.forget(self)
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """Close once all written replies are sent. Replies that are still pending are dropped."""
        self._leave()
        if self._transport is not None:
            self._uncork()
            self.last_active = self.server.clock()
            self._transport.close()

    def abort(self) -> None:
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._closing = True
        slots, self._slots = self._slots, deque()
        for slot in slots:
            self.server.held_bytes -= slot.held_bytes
            if slot.on_lost is not None:
                slot.on_lost()

    def authenticated(self, principal: Principal, session_ms: float = math.inf) -> None:
        """The client has proven who it is: from now on, and until its session ends, it may send any request."""
        if principal != self.principal:
            self._forget_turns()
        self.principal = principal
        self.meters.clear()
        self.session_end = perf_counter() + session_ms / 1000
        if self.nodes is not None:
            # Nodes have no delegation tokens: others may have made one in the name of a node.
            is_by_token = self.authentication is not None and self.authentication.is_by_token
            self.is_inter_broker = self.nodes.includes(principal) and not is_by_token
            self._follows_rules = self.nodes.follows_rules and not is_by_token
        self.frame_bytes_max = self.server.frame_bytes_max
        self.server.authenticated(self)

    def joins(self, tenant: TenantOnNode | None) -> None:
        """The principal belongs to this tenant from now on."""
        if tenant is not self.tenant:
            self._forget_turns()
        self.tenant = tenant
        self.meters.clear()

    def _forget_turns(self) -> None:
        """Without a turn the connection has to wait for one wherever something is owed."""
        for reservations in self.turns.values():
            for each in reservations:
                each.end()
        self.turns.clear()

    def authenticates_again(self) -> None:
        """A new login has begun, which only `authentication` knows about."""
        self.session_end = 0.0

    def close_after_replies(self) -> None:
        """Handle no further request, and close once the reply to the current one, and all before it, are sent."""
        self._held_by = PendingReply(-1)
        self.mute()
        # The handler that calls this has not returned its reply yet.
        asyncio.get_running_loop().call_soon(self._close_after_slots)

    def _close_after_slots(self) -> None:
        if self._slots:
            slot = self.defer(-1)
            slot.done, slot.reply = True, CLOSE_CONNECTION
        else:
            self.close()

    @property
    def may_send_as_node(self) -> bool:
        """Whether requests between nodes are served: to nodes, and to those whom the access rules allow them."""
        return self.is_inter_broker or self._follows_rules

    def may_send(self, api: Api) -> bool:
        """Whether a request that only nodes send is let in. Access rules may still refuse it."""
        return self.may_send_as_node and (not api.is_for_controllers or self.serves_controller)

    @property
    def serves_controller(self) -> bool:
        return self.nodes is not None and self.nodes.serves_controller

    @property
    def is_node(self) -> bool:
        """Whether the limits of clients do not apply: a node by its principal, or by a rule with CLUSTER_ACTION.

        Unlike `is_inter_broker`, this does not allow it to write internal topics.
        """
        return self.is_inter_broker or (self._follows_rules and self.server.is_node_by_rule(self))

    @property
    def waits_for_node(self) -> bool:
        """Whether the client waits for this node, and not this node for the client."""
        return bool(self._slots) or (isinstance(self._transport, TlsLayer) and self._transport.is_computing)

    @property
    def is_open(self) -> bool:
        return not self._closing

    def has_pending_reply(self, api_key: int) -> bool:
        """Whether the reply to a request of this API is still pending."""
        return any(slot.api_key == api_key and not slot.done for slot in self._slots)

    @property
    def has_pending_replies(self) -> bool:
        return bool(self._slots)

    @property
    def is_write_paused(self) -> bool:
        return self._write_paused

    def frame_seconds(self, now: float) -> float:
        """Return how long the client has been sending a frame that is incomplete; 0 if there is none.

        Time in which reading was paused does not count.
        """
        if self._partial is None or self._partial.is_whole:
            return 0.0
        return (self._muted_at if self._muted else now) - self._frame_began

    @property
    def is_peer_closed(self) -> bool:
        """Whether the peer has closed the connection while reading was paused, which asyncio does not report."""
        if not self._muted or self._transport is None:
            return False
        peer = self._transport.get_extra_info("socket")
        if peer is None or peer.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(peer.fileno(), _PEER_CLOSED)
        return bool(poller.poll(0))

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    # -- bytes in ------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._partial is None:
            return self.server.buffers.receive_buffer
        return self._partial.view[self._partial.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active = self.server.clock()
        account = self.account
        if account is not None:
            if not account.unmeasured:
                self._receive_measured(account, nbytes)
                return
            account.unmeasured -= 1
        if self._partial is None:
            self._consume(self.server.buffers.receive_buffer, nbytes)
        else:
            self._fill_partial(self._partial, nbytes)

    def _receive_measured(self, account: TimeAccount, nbytes: int) -> None:
        began = perf_counter()
        if account.is_ahead(began) and not self.is_node:
            self._is_expensive = True
        if self._partial is None:
            self._consume(self.server.buffers.receive_buffer, nbytes)
        else:
            self._fill_partial(self._partial, nbytes)
        account.spend_sampled(began, perf_counter())

    def _fill_partial(self, partial: PartialFrame, nbytes: int) -> None:
        partial.filled += nbytes
        if partial.is_whole:
            self._partial_is_whole(partial)
        elif partial.is_out_of_room:
            self._grow(partial)

    def _partial_is_whole(self, partial: PartialFrame) -> None:
        if partial.needed == 4:  # only now is the frame's size known
            self._partial = None
            self._consume(partial.view, 4)
        elif self._is_expensive:
            self._queue()
            return
        else:
            self._partial = None
            self._frame_began = 0.0
            try:
                self.handle(partial.view[4:])
            except Postponed:
                if self.server.buffers.is_crowded:
                    self.server.buffers.end(partial)
                    self.close()
                else:
                    self._partial = partial
                return
        self.server.buffers.end(partial)

    def _grow(self, partial: PartialFrame) -> None:
        if not self.server.buffers.grow(partial):
            self.server.wait_for_memory(self, to_grow=True)

    def _consume(self, data: memoryview, end: int, *, is_own: bool = False) -> None:
        """Handle every whole frame in data[:end]; replies to pipelined requests are sent together."""
        if self._corked is not None:
            # `Server.gathered` completed replies, which made room for these frames. Their replies are sent with those.
            assert self.server.is_gathering, "replies would overtake those held back"
            self._consume_frames(data, end, is_own)
            return
        self._corked = []
        try:
            self._consume_frames(data, end, is_own)
        finally:
            self.stop_corking()

    def stop_corking(self) -> None:
        """Send the replies that were held back; from here on each reply is sent at once."""
        self._uncork()
        self._corked = None
        self._is_pipelining = False

    def _uncork(self) -> None:
        corked = self._corked
        if corked:
            self._corked = []
            if self._transport is not None:
                self._write_all(corked)

    def _consume_frames(self, data: memoryview, end: int, is_own: bool) -> None:
        position, ends = 0, 0.0
        while end - position >= 4:
            (size,) = _SIZE.unpack_from(data, position)
            if not _FRAME_BYTES_MIN <= size <= self.frame_bytes_max:
                self._refuse_size(size)
                return
            after = position + 4 + size
            if after > end:
                self._keep(data[position:end], 4 + size)
                return
            if position and not ends:
                ends = self.server.slices.deadline()
                self._is_pipelining = True
            if self._muted or self._is_expensive or (ends and perf_counter() >= ends):
                self._keep_for_later(data[position:end], is_own)
                if not self._muted:
                    self._queue()
                return
            try:
                self.handle(data[position + 4 : after])
            except Postponed:
                self._keep_for_later(data[position:end], is_own)
                return
            if self._closing:
                return
            position = after
        if position < end:
            self._keep(data[position:end], 4)

    def _keep(self, piece: memoryview, needed: int) -> None:
        """Store the beginning of a frame; its read timeout starts with its first byte."""
        partial = self.server.buffers.begin(piece, needed)
        if partial is None:
            self._keep_for_later(piece)
            self.server.wait_for_memory(self)
            return
        self._partial = partial
        if not self._frame_began:
            self._frame_began = self.server.clock()

    def _keep_for_later(self, rest: memoryview, is_own: bool = False) -> None:
        """Keep frames that cannot be handled now, in a writable buffer: Produce writes offsets into the frame."""
        assert not self._backlog, "frames would change their order"
        self._backlog = rest if is_own else memoryview(bytearray(rest))
        self.server.buffers.count_backlog(len(rest))

    def _drop_backlog(self) -> memoryview:
        backlog, self._backlog = self._backlog, _EMPTY
        self.server.buffers.count_backlog(-len(backlog))
        return backlog

    def _refuse_size(self, size: int) -> None:
        if size >> 16 == _TLS_HANDSHAKE:
            self._refuse_tls()
            return
        setting = "socket.request.max.bytes"
        if self.frame_bytes_max < self.server.frame_bytes_max:
            setting = "sasl.server.max.receive.size"
        self.server.refuse(self, f"frame of {size} bytes; {setting} is {self.frame_bytes_max}")

    def _refuse_tls(self) -> None:
        """Answer with a TLS alert, so that the client can say that the handshake failed."""
        if self._transport is not None:
            self._transport.write(HANDSHAKE_FAILURE_ALERT)
        self.server.refusals.refuse(
            self, "tls_on_plaintext", "the client speaks TLS to a listener without it; it needs another port"
        )
        self.close()

    def handle(self, frame: memoryview) -> None:
        """Raises Postponed."""
        try:
            self.server.dispatch(self, frame)
        except Postponed:
            raise
        except MalformedFrame as error:
            self.server.refuse(self, str(error))
        except Exception:
            # A bug of ours: this connection is closed and its client may retry; other connections are not affected.
            self.server.failed(self)

    # -- flow control --------------------------------------------------------------------------------

    def mute(self) -> None:
        if not self._muted and self._transport is not None:
            self._muted = True
            self._muted_at = self.server.clock()
            self._transport.pause_reading()

    def unmute(self, *, is_turn: bool = False) -> None:
        """Resume reading, after the frames that were already received; these may have to wait for their turn."""
        server = self.server
        if (
            not self._muted
            or self._is_queued
            or self._throttle is not None
            or self._held_by is not None
            or self._holds
            or self._write_paused
            or len(self._slots) >= server.inflight_max
            or server.is_closing
        ):
            return
        account = self.account
        if account is None or is_turn or not self._has_frames or not self.server.slices.accounts.are_several:
            self._go_on()
            return
        began = perf_counter()
        if account.is_ahead(began) and not self.is_node:
            self._queue()
        else:
            self._go_on()
            account.spend(began, perf_counter())

    @property
    def _has_frames(self) -> bool:
        """Whether there are frames that may be handled before more is read."""
        return bool(self._backlog) or (self._partial is not None and self._partial.is_whole)

    def _go_on(self) -> None:
        self._muted = False
        if self._frame_began:
            self._frame_began += self.server.clock() - self._muted_at
        if self._partial is None:
            if self._backlog:
                backlog = self._drop_backlog()
                self._consume(backlog, len(backlog), is_own=True)
        elif self._partial.is_whole:
            self._partial_is_whole(self._partial)
        elif self._partial.is_out_of_room:
            self._grow(self._partial)
        if not self._muted and self._transport is not None:
            self._transport.resume_reading()

    def throttle(self, milliseconds: int) -> None:
        """Read no further requests for this long, because the client has exceeded a quota; replies go out at once."""
        loop = asyncio.get_running_loop()
        until = loop.time() + milliseconds / 1000
        if self._throttle is not None:
            if self._throttle.when() >= until:
                return
            self._throttle.cancel()
        self._throttle = loop.call_at(until, self._throttle_over)
        self.mute()

    @property
    def throttle_ms(self) -> int:
        """For how long no request of this connection will be read because of a quota."""
        if self._throttle is None:
            return 0
        return max(math.ceil((self._throttle.when() - asyncio.get_running_loop().time()) * 1000), 0)

    def _throttle_over(self) -> None:
        self._throttle = None
        self.unmute()

    def _queue(self) -> None:
        """Make the frames wait for their turn; reading pauses meanwhile."""
        self.mute()
        if not self._is_queued:
            self._is_queued = True
            self.server.slices.queue(self, self.account)

    def hold(self) -> None:
        """Handle no further requests before `release`."""
        self._holds += 1
        self.mute()

    def release(self) -> None:
        self._holds -= 1
        self.unmute()

    def run_queued(self) -> None:
        """Handle the frames that waited in the queue; frames of a peer that has closed the connection are dropped."""
        self._is_queued = False
        if self._closing or self.abort_if_peer_closed():
            return
        self._is_expensive = False
        self.unmute(is_turn=True)

    def abort_if_peer_closed(self) -> bool:
        """Abort if the peer has closed the connection and no Produce request waits; return whether that was done.

        Of the waiting requests only Produce is kept: a producer with acks=0 may close as soon as it has sent its
        records. But a connection that still waits for its first turn has no claim to it.
        """
        if not self.is_peer_closed:
            return False
        if any(self.turns.values()):
            self.abort()
            return True
        backlog, kept, position = self._drop_backlog(), bytearray(), 0
        while len(backlog) - position >= 4:
            after = position + 4 + _SIZE.unpack_from(backlog, position)[0]
            if backlog[position + 4 : position + 6] == _PRODUCE_KEY_BYTES:
                kept += backlog[position:after]
            position = after
        if kept:
            self._keep_for_later(memoryview(kept), is_own=True)
            return False
        if self._partial is not None and self._partial.view[4:6] == _PRODUCE_KEY_BYTES:
            return False
        self.abort()
        return True

    def mark_expensive(self) -> None:
        """A request took longer than a time slice: the next one waits until other connections had theirs."""
        self._is_expensive = True

    def pause_writing(self) -> None:
        self._write_paused = True
        self.server.slow_readers.add(self)
        self.mute()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.server.slow_readers.discard(self)
        self.unmute()

    # -- replies out ---------------------------------------------------------------------------------

    def send(self, reply: Reply) -> None:
        """Send the reply to the request that is being handled right now, after all earlier replies."""
        if reply is None:
            return
        if not self._slots:
            self._write(reply)
            return
        slot = self.defer(-1)
        slot.done, slot.reply = True, reply
        self._hold(slot)

    def defer(self, api_key: int) -> PendingReply:
        """Reserve the position of a reply that will come through `fulfil`."""
        slot = PendingReply(api_key)
        self._slots.append(slot)
        if len(self._slots) >= self.server.inflight_max:
            self.mute()
        return slot

    def wait_for_reply(self, slot: PendingReply) -> None:
        """Handle no further requests before this reply is sent."""
        self._held_by = slot
        self.mute()

    def _hold(self, slot: PendingReply) -> None:
        """Count the memory of a reply that is ready but has to wait for earlier replies."""
        reply = slot.reply
        slot.held_bytes = sum(map(len, reply)) if isinstance(reply, list) else len(reply or b"")
        self.server.held_bytes += slot.held_bytes

    def fulfil(self, slot: PendingReply, reply: Reply) -> None:
        self.server.metrics.observe_request(slot.api_key, perf_counter() - slot.started)
        slot.done, slot.reply = True, reply
        slots = self._slots
        if slots and slots[0] is not slot:
            self._hold(slot)
        while slots and slots[0].done:
            ready = slots.popleft()
            self.server.held_bytes -= ready.held_bytes
            if ready.reply is not None:
                self._write(ready.reply)
            slots = self._slots
        if self._muted:
            if slot is self._held_by:
                self._held_by = None
            self.server.progress()
            self.unmute()

    def _write(self, reply: bytes | bytearray | list[BytesLike]) -> None:
        corked = self._corked
        if corked is None and type(reply) is bytes and self.server.gather(self):
            corked = self._corked = []
        if corked is not None and type(reply) is bytes:
            corked.append(reply)
            if len(reply) > _CORKED_REPLY_BYTES_MAX:
                if self._is_pipelining:
                    self._limit_unsent()
                self._uncork()
            elif len(corked) > _CORKED_REPLIES_MAX:
                self._uncork()
        elif reply is CLOSE_CONNECTION:
            self.close()
        elif self._transport is not None:
            if corked:
                self._uncork()
            if isinstance(reply, list):
                if self._is_pipelining:
                    self._limit_unsent()
                self._write_all(reply)
            else:
                self._transport.write(reply)

    def _limit_unsent(self) -> None:
        """Otherwise the kernel would accept megabytes of replies for a client that does not read them."""
        peer = None if self._transport is None else self._transport.get_extra_info("socket")
        if peer is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)

    def _write_all(self, buffers: list[BytesLike]) -> None:
        """Use `writelines` only with uvloop: from Python 3.12 on asyncio's own does not call `pause_writing`."""
        assert self._transport is not None
        if self.server.gathers_writes:
            self._transport.writelines(buffers)
        else:
            self._transport.write(b"".join(buffers))
