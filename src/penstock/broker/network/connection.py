"""One client's connection: frames in, replies out in request order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from penstock.broker.apis import PRODUCE
from penstock.broker.buffers import PartialFrame
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import MalformedFrame

if TYPE_CHECKING:
    from penstock.broker.server import Server

logger = logging.getLogger("penstock.server")

Reply = bytes | bytearray | list[BytesLike] | None
#: In the place of a reply: the connection ends here, after what is owed before it.
HANG_UP: Final = bytearray()
_SIZE = struct.Struct(">i")
#: api key, version, correlation id: less than that is no request
_FRAME_BYTES_MIN = 8
#: Replies held back while frames are handled: what is more, or larger, leaves at once, so that a reader that
#: is too slow is noticed before the next frame.
_CORKED_REPLIES_MAX = 64
_CORKED_REPLY_BYTES_MAX = 4096
#: Linux reports with it that a peer has closed its side, even while unread bytes are queued before the end.
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
#: Of large replies to pipelined requests, what the kernel holds unsent before this connection has to wait.
_UNSENT_BYTES_MAX = 64 << 10
_NOTHING = memoryview(bytearray())
_PRODUCE = struct.pack(">h", PRODUCE)  # as a frame begins
_numbers = itertools.count(1)


class Slot:
    """The place of a reply that comes later; replies behind it wait for it.

    `on_lost` is called if the connection ends first.
    """

    __slots__ = ("api_key", "done", "held_bytes", "on_lost", "reply", "started")

    def __init__(self, api_key: int) -> None:
        self.api_key = api_key
        self.started = perf_counter()
        self.done = False
        self.reply: Reply = None
        self.held_bytes = 0  # of a reply that waits for those before it
        self.on_lost: Callable[[], object] | None = None


class Connection(asyncio.BufferedProtocol):
    __slots__ = (
        "_backlog", "_closing", "_corked", "_frame_began", "_held_by", "_is_expensive", "_is_pipelining",
        "_is_queued", "_muted", "_muted_at", "_partial", "_slots", "_transport", "_write_paused",
        "client_host", "for_nodes", "last_active", "listener", "number", "on_lost", "peer", "server",
        "software",
    )  # fmt: skip

    def __init__(self, server: Server, listener: str, *, for_nodes: bool = False) -> None:
        self.server = server
        self.listener = listener
        self.for_nodes = for_nodes  # came in on the listener that nodes use among themselves
        self.number = next(_numbers)  # in the order in which connections arrive
        self.client_host = self.peer = "?"
        self.software = ("", "")  # name and version of the client library, once ApiVersions has told them
        self.last_active = 0.0
        self._transport: asyncio.Transport | None = None
        self._slots: deque[Slot] = deque()
        self._partial: PartialFrame | None = None
        self._frame_began = (
            0.0  # when its first byte came, moved on by the time it was not read; 0 without one
        )
        self._backlog = _NOTHING  # whole frames that wait, in a buffer of this connection's own
        self._corked: list[BytesLike] | None = None  # replies held back while frames are handled
        self._muted = self._write_paused = self._closing = False
        self._muted_at = 0.0
        self._held_by: Slot | None = None  # a request whose answer the next ones wait for
        self._is_pipelining = False  # the request being handled came right behind another
        self._is_queued = False  # waits for its turn in the server's queue
        self._is_expensive = False  # a request took longer than a turn: the next one waits for its turn
        #: Called when the connection has ended, whoever ended it.
        self.on_lost: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.peer} on {self.listener}, {len(self._slots)} waiting>"

    # -- life ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            self.client_host, self.peer = address[0], f"{address[0]}:{address[1]}"
        self.last_active = self.server.clock()
        self.server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._leave()
        if self._partial is not None:
            self.server.buffers.end(self._partial)
            self._partial = None
        self._drop_backlog()
        self.server.forget(self)
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """End once the client has what was written; what is still owed is not waited for."""
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

    @property
    def is_open(self) -> bool:
        return not self._closing

    def owes(self, api_key: int) -> bool:
        """A reply to such a request is still due."""
        return any(slot.api_key == api_key and not slot.done for slot in self._slots)

    @property
    def is_owed_replies(self) -> bool:
        return bool(self._slots)

    @property
    def is_write_paused(self) -> bool:
        return self._write_paused

    def frame_seconds(self, now: float) -> float:
        """How long the client has been sending a frame that is not whole; 0 if it sends none.

        Time in which this connection was not read does not count.
        """
        if self._partial is None or self._partial.is_whole:
            return 0.0
        return (self._muted_at if self._muted else now) - self._frame_began

    @property
    def has_hung_up(self) -> bool:
        """The peer has gone, which a connection that is not read from does not hear."""
        if not self._muted or self._transport is None:
            return False
        peer = self._transport.get_extra_info("socket")
        if peer is None or peer.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(peer.fileno(), _HUNG_UP)
        return bool(poller.poll(0))

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    # -- bytes in ------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._partial is None:
            return self.server.buffers.landing
        return self._partial.view[self._partial.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active = self.server.clock()
        if self._partial is None:
            self._consume(self.server.buffers.landing, nbytes)
            return
        partial = self._partial
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
            self.server.queue(self)
            return
        else:
            self._partial = None
            self._frame_began = 0.0
            self.handle(partial.view[4:])
        self.server.buffers.end(partial)

    def _grow(self, partial: PartialFrame) -> None:
        if not self.server.buffers.grow(partial):
            self.server.wait_for_memory(self, to_grow=True)

    def _consume(self, data: memoryview, end: int, *, is_own: bool = False) -> None:
        """Handle every whole frame in data[:end]; replies to pipelined requests leave together."""
        if self._corked is not None:
            # Replies that are let go together made room for these frames; what answers them leaves with those.
            assert self.server.is_gathering, "replies would overtake those held back"
            self._consume_frames(data, end, is_own)
            return
        self._corked = []
        try:
            self._consume_frames(data, end, is_own)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """What was held back leaves; from here on replies leave one by one."""
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
            if not _FRAME_BYTES_MIN <= size <= self.server.frame_bytes_max:
                self._refuse_size(size)
                return
            after = position + 4 + size
            if after > end:
                self._keep(data[position:end], 4 + size)
                return
            if position and not ends:
                ends = self.server.slice_ends()
                self._is_pipelining = True
            if self._muted or self._is_expensive or (ends and perf_counter() >= ends):
                self._keep_for_later(data[position:end], is_own)
                if not self._muted:
                    self.server.queue(self)
                return
            self.handle(data[position + 4 : after])
            if self._closing:
                return
            position = after
        if position < end:
            self._keep(data[position:end], 4)

    def _keep(self, piece: memoryview, needed: int) -> None:
        """The beginning of a frame, whose time runs from its first byte."""
        partial = self.server.buffers.begin(piece, needed)
        if partial is None:
            self._keep_for_later(piece)
            self.server.wait_for_memory(self)
            return
        self._partial = partial
        if not self._frame_began:
            self._frame_began = self.server.clock()

    def _keep_for_later(self, rest: memoryview, is_own: bool = False) -> None:
        """Frames that cannot be handled now. A copy that can be written to: produce stamps offsets into it."""
        assert not self._backlog, "frames would change their order"
        self._backlog = rest if is_own else memoryview(bytearray(rest))
        self.server.buffers.count_backlog(len(rest))

    def _drop_backlog(self) -> memoryview:
        backlog, self._backlog = self._backlog, _NOTHING
        self.server.buffers.count_backlog(-len(backlog))
        return backlog

    def _refuse_size(self, size: int) -> None:
        self.server.refuse(
            self, f"frame of {size} bytes; socket.request.max.bytes is {self.server.frame_bytes_max}"
        )

    def handle(self, frame: memoryview) -> None:
        try:
            self.server.dispatch(self, frame)
        except MalformedFrame as error:
            self.server.refuse(self, str(error))
        except Exception:
            # Our own mistake: this client is cut off and may retry, nobody else notices.
            self.server.failed(self)

    # -- flow control --------------------------------------------------------------------------------

    def mute(self) -> None:
        if not self._muted and self._transport is not None:
            self._muted = True
            self._muted_at = self.server.clock()
            self._transport.pause_reading()

    def unmute(self) -> None:
        """Go on reading, first with what was already received."""
        server = self.server
        if (
            not self._muted
            or self._is_queued
            or self._held_by is not None
            or self._write_paused
            or len(self._slots) >= server.inflight_max
            or server.is_closing
        ):
            return
        self._muted = False
        if self._frame_began:
            self._frame_began += server.clock() - self._muted_at
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

    def wait_for_turn(self) -> bool:
        """Whether it was not waiting yet."""
        self.mute()
        was_queued, self._is_queued = self._is_queued, True
        return not was_queued

    def take_turn(self) -> None:
        """Handle frames that have waited for their turn; those of a peer that has gone are dropped."""
        self._is_queued = False
        if self._closing or self.leaves_with_its_peer():
            return
        self._is_expensive = False
        self.unmute()

    def leaves_with_its_peer(self) -> bool:
        """Whether the peer has gone, and has left nothing to do: of what waits only records are still taken.

        A producer that waits for no answer may close as soon as it has sent them.
        """
        if not self.has_hung_up:
            return False
        backlog, kept, position = self._drop_backlog(), bytearray(), 0
        while len(backlog) - position >= 4:
            after = position + 4 + _SIZE.unpack_from(backlog, position)[0]
            if backlog[position + 4 : position + 6] == _PRODUCE:
                kept += backlog[position:after]
            position = after
        if kept:
            self._keep_for_later(memoryview(kept), is_own=True)
            return False
        if self._partial is not None and self._partial.view[4:6] == _PRODUCE:
            return False
        self.abort()
        return True

    def mark_expensive(self) -> None:
        """A request has taken more than a turn: the next one waits until others have had theirs."""
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
        """The reply to the request being handled right now."""
        if reply is None:
            return
        if not self._slots:
            self._write(reply)
            return
        slot = self.defer(-1)
        slot.done, slot.reply = True, reply
        self._hold(slot)

    def defer(self, api_key: int) -> Slot:
        """Hold the place of a reply that will come through `fulfil`."""
        slot = Slot(api_key)
        self._slots.append(slot)
        if len(self._slots) >= self.server.inflight_max:
            self.mute()
        return slot

    def wait_for_reply(self, slot: Slot) -> None:
        """Handle no more requests before this one is answered."""
        self._held_by = slot
        self.mute()

    def _hold(self, slot: Slot) -> None:
        """A reply that is ready and has to wait: its memory is counted."""
        reply = slot.reply
        slot.held_bytes = sum(map(len, reply)) if isinstance(reply, list) else len(reply or b"")
        self.server.held_bytes += slot.held_bytes

    def fulfil(self, slot: Slot, reply: Reply) -> None:
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
        elif reply is HANG_UP:
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
        """The kernel would take megabytes of replies for a client that does not read them."""
        peer = None if self._transport is None else self._transport.get_extra_info("socket")
        if peer is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)

    def _write_all(self, buffers: list[BytesLike]) -> None:
        """asyncio's own transport, from Python 3.12 on, forgets to pause us after `writelines`."""
        assert self._transport is not None
        if self.server.gathers_writes:
            self._transport.writelines(buffers)
        else:
            self._transport.write(b"".join(buffers))
