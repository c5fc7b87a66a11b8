"""TLS between a socket and a protocol of ours, by `ssl.MemoryBIO`; see docs/decisions/0029-tls.md.

A `TlsLayer` is the protocol of the socket's transport and the transport of the protocol above it. Handshakes compute
in a thread of their own, so that they do not hold up other connections. `TlsContexts` holds keys and certificates of a
listener, and reads them again when their files change.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.protocol.compression import BytesLike
from penstock.protocol.secret_file import SecretFile

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.network.slices import TimeSlices
    from penstock.protocol.config_def import SettingValue

logger = logging.getLogger("penstock.tls")

_RECEIVE_BYTES: Final = 256 * 1024
#: What OpenSSL is given at once. One call handles all the handshake messages that it has, which an established
#: connection may send too, and nothing can interrupt it.
_PIECE_BYTES: Final = 32 * 1024
#: How much is encrypted before the socket's buffer is looked at again.
_ENCRYPTED_BYTES_MAX: Final = 64 * 1024
#: Buffers up to this size in total are joined, because each record costs 22 bytes and a call.
_JOINED_BYTES_MAX: Final = 64 * 1024
#: The first byte of a TLS handshake.
HANDSHAKE_RECORD: Final = 0x16
#: A TLS record that says "handshake failure", for a client that speaks TLS to a listener without it.
HANDSHAKE_FAILURE_ALERT: Final = bytes((21, 3, 1, 0, 2, 2, 40))
_NOTHING: Final = memoryview(b"")

_PEM: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


class TlsUnusable(Exception):
    """Keys or certificates cannot be used. The message contains no secret."""


class PlaintextReceived(ssl.SSLError):
    """The peer does not speak TLS."""

    def __init__(self) -> None:
        super().__init__("the client does not speak TLS")


# -- keys and certificates -------------------------------------------------------------------------------


class TlsContexts:
    """The contexts of one listener, for accepting connections and for connecting to other nodes.

    A connection keeps the context that it began with.
    """

    def __init__(self, value: Callable[[str], SettingValue], *, connects: bool) -> None:
        """Read keys and certificates. `connects` asks for a context to connect to others. Raises TlsUnusable."""
        self._value = value
        self._connects = connects
        self.server: ssl.SSLContext
        self.client: ssl.SSLContext | None = None
        self._seen = self._stamps()
        self._load()

    def for_client(self) -> ssl.SSLContext:
        assert self.client is not None, "not made for connecting to others"
        return self.client

    def reload_changed(self) -> bool:
        """Read files that have changed. Blocks. If they cannot be used, the old contexts stay; raises TlsUnusable."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        self._load()
        return True

    def _load(self) -> None:
        server = self._new_context(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = _CLIENT_AUTH[str(self._value("ssl.client.auth"))]
        client = None
        if self._connects:
            client = self._new_context(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname = self._value("ssl.endpoint.identification.algorithm") == "https"
            client.verify_mode = ssl.CERT_REQUIRED
        self.server, self.client = server, client

    def _new_context(self, role: int) -> ssl.SSLContext:
        value = self._value
        context = ssl.SSLContext(role)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        versions = [_VERSIONS[str(name)] for name in cast(Iterable[str], value("ssl.enabled.protocols"))]
        context.minimum_version, context.maximum_version = min(versions), max(versions)
        if suites := cast(Iterable[str], value("ssl.cipher.suites")):
            try:
                context.set_ciphers(":".join(suites))
            except ssl.SSLError:
                raise TlsUnusable("ssl.cipher.suites names none that OpenSSL knows") from None
        self._load_key(context)
        self._load_authorities(context)
        return context

    def _load_key(self, context: ssl.SSLContext) -> None:
        value = self._value
        location, password = value("ssl.keystore.location"), value("ssl.key.password")
        with ExitStack() as stack:
            if location is None:
                text = f"{value('ssl.keystore.key')}\n{value('ssl.keystore.certificate.chain')}"
                path = stack.enter_context(SecretFile(_normalized_pem(text, "ssl.keystore.key"))).path
            else:
                path = os.path.expanduser(str(location))
            try:
                # Without a password, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(path, password="" if password is None else str(password))
            except (OSError, ValueError) as error:
                what = "ssl.keystore.key" if location is None else f"ssl.keystore.location={location}"
                raise TlsUnusable(
                    f"{what}: no usable private key and certificate in PEM: {_why(error)}"
                ) from None

    def _load_authorities(self, context: ssl.SSLContext) -> None:
        location, text = self._value("ssl.truststore.location"), self._value("ssl.truststore.certificates")
        try:
            if location is not None:
                context.load_verify_locations(cafile=os.path.expanduser(str(location)))
            elif text is not None:
                context.load_verify_locations(
                    cadata=_normalized_pem(str(text), "ssl.truststore.certificates")
                )
        except (OSError, ValueError) as error:
            what = (
                "ssl.truststore.certificates" if location is None else f"ssl.truststore.location={location}"
            )
            raise TlsUnusable(f"{what}: no usable certificates in PEM: {_why(error)}") from None

    def _stamps(self) -> tuple[tuple[int, ...] | None, ...]:
        names = ("ssl.keystore.location", "ssl.truststore.location")
        return tuple(
            None if (location := self._value(name)) is None else _stamp(os.path.expanduser(str(location)))
            for name in names
        )


def load_contexts(settings: NodeSettings) -> dict[str, TlsContexts]:
    """Read the keys and certificates of all listeners that speak TLS. Raises TlsUnusable."""
    contexts = {}
    for name, protocol in settings.protocols.items():
        if protocol.uses_tls:
            try:
                contexts[name] = TlsContexts(
                    partial(settings.listener_value, name), connects=name in settings.node_listeners
                )
            except TlsUnusable as error:
                raise TlsUnusable(f"listener {name}: {error}") from None
    return contexts


def http_contexts(settings: NodeSettings) -> TlsContexts:
    """Read the key and the certificate of the HTTP endpoint, which asks for no certificates. Raises TlsUnusable."""

    def value(name: str) -> SettingValue:
        return "none" if name == "ssl.client.auth" else settings[name]

    return TlsContexts(value, connects=False)


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is damaged, or the password is wrong"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _normalized_pem(text: str, setting: str) -> str:
    """Return PEM with its line breaks: in a settings file, one line may contain all of it."""
    blocks = [
        f"-----BEGIN {name}-----\n{_lines(body)}\n-----END {name}-----\n" for name, body in _PEM.findall(text)
    ]
    if not blocks:
        raise TlsUnusable(f"{setting} contains no PEM text")
    return "".join(blocks)


def _lines(body: str) -> str:
    if ":" in body:  # headers of an encrypted key, which must stay as they are
        return body.strip()
    base64 = "".join(body.replace("\\n", "").split())
    return "\n".join(base64[start : start + 64] for start in range(0, len(base64), 64))


# -- the layer -------------------------------------------------------------------------------------------


class Handshakes:
    """What all layers of a node share: a thread that computes handshakes, a buffer for received bytes, time slices."""

    def __init__(self, slices: TimeSlices) -> None:
        self.slices = slices
        self.receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self.loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "penstock-tls")

    def compute(self, step: Callable[[], Exception | None], done: Callable[[Exception | None], None]) -> None:
        """Run `step` in the thread, then `done` with its result on the event loop."""
        self._thread.submit(self._run, step, done)

    def _run(self, step: Callable[[], Exception | None], done: Callable[[Exception | None], None]) -> None:
        outcome = step()
        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(done, outcome)

    async def in_thread(self, call: Callable[[], bool]) -> bool:
        return await self.loop.run_in_executor(self._thread, call)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class TlsLayer(asyncio.BufferedProtocol, asyncio.Transport):
    """`finished` is called once: with None when the handshake is complete, or else with the reason why it failed.

    What is written before that waits. `upper` gets `connection_made` at once.
    """

    __slots__ = (
        "_encrypted", "_finished", "_handshakes", "_incoming", "_is_closing", "_is_decrypting", "_is_established",
        "_is_paused", "_is_queued", "_is_stepping", "_is_upper_paused", "_is_write_paused", "_new_object", "_outgoing",
        "_raw", "_ssl", "_turn_ends", "_unsent", "_unsent_bytes", "_upper",
    )  # fmt: skip

    def __init__(
        self,
        upper: asyncio.BufferedProtocol,
        handshakes: Handshakes,
        context: Callable[[], ssl.SSLContext],
        finished: Callable[[TlsLayer, Exception | None], None],
        *,
        server_hostname: str | None = None,
    ) -> None:
        """With `server_hostname` this is the client's side."""
        self._upper = upper
        self._handshakes = handshakes
        self._finished: Callable[[TlsLayer, Exception | None], None] | None = finished
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._raw: asyncio.Transport | None = None
        self._ssl: ssl.SSLObject | None = None
        is_server = server_hostname is None

        def new_object() -> ssl.SSLObject:
            return context().wrap_bio(
                self._incoming, self._outgoing, server_side=is_server, server_hostname=server_hostname
            )

        self._new_object: Callable[[], ssl.SSLObject] | None = new_object
        if not is_server:
            self._ssl = new_object()
        self._encrypted = _NOTHING  # received bytes that OpenSSL has not been given yet
        self._turn_ends = 0.0  # the end of this turn; 0 while it is not known
        self._is_established = self._is_stepping = self._is_decrypting = False
        self._is_queued = False  # waits for its turn to decrypt more
        self._is_paused = self._is_write_paused = self._is_upper_paused = self._is_closing = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    def __repr__(self) -> str:
        return f"<TlsLayer {'established' if self._is_established else 'in its handshake'}>"

    @property
    def is_computing(self) -> bool:
        """Whether the peer waits for this node to go on with the handshake."""
        return self._is_stepping

    def peer_certificate(self) -> bytes | None:
        """Return the peer's certificate in DER, once it is verified."""
        return None if self._ssl is None else self._ssl.getpeercert(binary_form=True)

    # -- handshake -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._upper.connection_made(self)
        if self._ssl is not None:
            self._begin_step()

    def _begin_step(self) -> None:
        """Pause reading meanwhile, because the thread uses the buffers."""
        assert self._raw is not None
        self._is_stepping = True
        self._raw.pause_reading()
        self._handshakes.compute(self._step, self._step_done)

    def _step(self) -> Exception | None:
        """Runs in the thread."""
        if self._raw is None:
            return ssl.SSLWantReadError()
        try:
            if self._ssl is None:
                assert self._new_object is not None
                self._ssl = self._new_object()
            self._ssl.do_handshake()
        except (ssl.SSLError, OSError, ValueError) as error:
            return error
        return None

    def _step_done(self, failure: Exception | None) -> None:
        self._is_stepping = False
        if self._raw is None:
            return
        self._flush()  # of a failed handshake too: its alert tells the peer why
        if isinstance(failure, ssl.SSLWantReadError):
            self._resume_raw()
        elif failure is not None:
            self._fail(failure)
        elif self._is_closing:
            self._shut_down()
        else:
            self._is_established = True
            self._new_object = None
            self._conclude(None)
            self._resume_raw()
            self._decrypt()
            self._encrypt()

    def _fail(self, failure: Exception) -> None:
        self._conclude(failure)
        if self._raw is not None:
            self._raw.close()

    def _conclude(self, failure: Exception | None) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            finished(self, failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self._raw = None
        self._encrypted = _NOTHING
        self._unsent.clear()
        self._unsent_bytes = 0
        self._conclude(exc or ConnectionError("the connection was closed"))
        self._upper.connection_lost(exc)

    # -- bytes in ------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._handshakes.receive_buffer
        return buffer if self._is_established else buffer[:_PIECE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        received = self._handshakes.receive_buffer
        if self._ssl is None and received[0] != HANDSHAKE_RECORD:
            self._fail(PlaintextReceived())
            return
        if not self._is_established:
            self._incoming.write(received[:nbytes])
            if not self._is_stepping:
                self._begin_step()
            return
        if self._encrypted:  # the transport has received more although it was paused
            self._encrypted = memoryview(bytes(self._encrypted) + received[:nbytes])
            self._decrypt()
            return
        self._encrypted = received[:nbytes]
        self._decrypt()
        if self._encrypted:
            # A copy, because other connections receive into the buffer too.
            self._encrypted = memoryview(bytes(self._encrypted))

    def _decrypt(self) -> None:
        """Hand on what has arrived, as long as the protocol above takes it and this turn lasts.

        Nothing once this side closes: a client whose certificate was refused may have sent requests with its handshake.
        """
        if self._is_decrypting or self._is_queued or self._ssl is None:
            return
        self._is_decrypting = True
        self._turn_ends = -1.0
        upper = self._upper
        try:
            while self._has_more() and not (self._is_paused or self._is_closing or self._raw is None):
                if self._is_turn_over():
                    self._wait_for_turn()
                    break
                filled = self._read_into(cast(memoryview, upper.get_buffer(-1)))
                if filled:
                    upper.buffer_updated(filled)
                elif not self._encrypted:
                    break  # the rest of a record has not arrived
        except ssl.SSLError as error:
            logger.info("TLS failed", extra={"reason": str(error)})
            self._flush()
            self.abort()
        finally:
            self._is_decrypting = False
        if self._outgoing.pending:
            self._flush()

    def _has_more(self) -> bool:
        assert self._ssl is not None
        return bool(self._incoming.pending or self._encrypted or self._ssl.pending())

    def _read_into(self, buffer: memoryview) -> int:
        """Return how many bytes were decrypted; 0 if the rest of a record has not arrived, or this turn is over."""
        assert self._ssl is not None
        tls = self._ssl
        filled, size = 0, len(buffer)
        try:
            while filled < size:
                try:
                    count = cast(
                        int, tls.read(size - filled, cast(Any, buffer[filled:] if filled else buffer))
                    )
                except ssl.SSLWantReadError:
                    if not self._feed():
                        break
                else:
                    if not count:
                        self._handshakes.loop.call_soon(self.close)  # the peer has said that it closes
                        break
                    filled += count
                if not self._has_more() or self._is_turn_over():
                    break
        except ssl.SSLZeroReturnError:
            self._handshakes.loop.call_soon(self.close)
        return filled

    def _feed(self) -> bool:
        """Give OpenSSL the next piece of what has arrived; return False if there is none."""
        piece, self._encrypted = self._encrypted[:_PIECE_BYTES], self._encrypted[_PIECE_BYTES:]
        if piece:
            self._incoming.write(piece)
        return bool(piece)

    # -- turns ---------------------------------------------------------------------------------------
    # A record may contain a single byte, so that one read from the socket may contain ten thousand records.

    def _is_turn_over(self) -> bool:
        """The first step of a turn needs no look at the clock: most reads contain one record."""
        if self._turn_ends < 0:
            self._turn_ends = 0.0
            return False
        if not self._turn_ends:
            self._turn_ends = self._handshakes.slices.deadline()
            return False
        return perf_counter() >= self._turn_ends

    def _wait_for_turn(self) -> None:
        """Decrypt the rest in a later iteration of the event loop, in turn with all that waits."""
        assert self._raw is not None
        self._is_queued = True
        self._raw.pause_reading()
        self._handshakes.slices.queue(self, None)

    def run_queued(self) -> None:
        self._is_queued = False
        if self._raw is not None:
            self._decrypt()
            self._resume_raw()

    def eof_received(self) -> bool:
        self.close()
        return True  # what is still unsent goes out first

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._raw is not None and not self._is_stepping:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._resume_raw()
        if not self._is_decrypting and self._is_established:
            # Not at once: the protocol above may still be handling what it has received.
            self._handshakes.loop.call_soon(self._decrypt)

    def _resume_raw(self) -> None:
        if self._raw is not None and not (self._is_paused or self._is_stepping or self._is_queued):
            self._raw.resume_reading()

    # -- bytes out -----------------------------------------------------------------------------------

    def write(self, data: BytesLike) -> None:
        if self._is_closing or self._raw is None:
            return
        if self._is_established and not self._unsent and len(data) <= _JOINED_BYTES_MAX:
            assert self._ssl is not None
            if data:
                self._ssl.write(data)
                self._raw.write(self._outgoing.read())
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._encrypt()

    def writelines(self, list_of_data: Iterable[BytesLike]) -> None:
        buffers = list(list_of_data)
        if sum(map(len, buffers)) <= _JOINED_BYTES_MAX:
            self.write(b"".join(buffers))
            return
        for buffer in buffers:
            self.write(buffer)

    def _encrypt(self) -> None:
        """Encrypt what waits, as long as the socket takes it."""
        if not self._is_established or self._raw is None:
            return
        assert self._ssl is not None
        unsent = self._unsent
        while unsent and not self._is_write_paused:
            piece = unsent.popleft()
            if len(piece) > _ENCRYPTED_BYTES_MAX:
                unsent.appendleft(piece[_ENCRYPTED_BYTES_MAX:])
                piece = piece[:_ENCRYPTED_BYTES_MAX]
            if piece:
                self._ssl.write(piece)
                self._unsent_bytes -= len(piece)
                self._raw.write(self._outgoing.read())
        self._tell_upper()
        if self._is_closing and not unsent:
            self._shut_down()

    def _flush(self) -> None:
        if self._raw is not None and self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._tell_upper()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._encrypt()
        self._tell_upper()

    def _tell_upper(self) -> None:
        must_pause = self._is_write_paused or bool(self._unsent)
        if must_pause != self._is_upper_paused:
            self._is_upper_paused = must_pause
            if must_pause:
                self._upper.pause_writing()
            else:
                self._upper.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + (0 if self._raw is None else self._raw.get_write_buffer_size())

    # -- the end -------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing or self._raw is None or self._raw.is_closing()

    def close(self) -> None:
        """Close once everything is sent."""
        if self._is_closing:
            return
        self._is_closing = True
        if not self._is_established or not self._unsent:
            self._shut_down()

    def _shut_down(self) -> None:
        if self._raw is None:
            return
        if self._is_established:
            assert self._ssl is not None
            with suppress(ssl.SSLError):  # the answer of the peer is not waited for
                self._ssl.unwrap()
            self._flush()
        self._raw.close()

    def abort(self) -> None:
        self._is_closing = True
        if self._raw is not None:
            self._raw.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._ssl
        return default if self._raw is None else self._raw.get_extra_info(name, default)
