"""TLS as an attacker speaks it: damaged hellos and finishes, plaintext, and records that nobody encrypted."""

import asyncio
import random
import ssl
import struct

WAIT_S = 5.0
_ALERT, _HANDSHAKE, _APPLICATION_DATA = 21, 22, 23
_PIECE = 65_536


async def attack(address: tuple[str, int], context: ssl.SSLContext, chance: random.Random) -> bytes:
    """One connection; returns what the node sent that was not encrypted, or that was encrypted for this client."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await chance.choice((_plaintext, _damaged_hello, _damaged_finish, _unencrypted))(
            reader, writer, context, chance
        )
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Until the node ends the connection, or as long as it says something."""
    received = b""
    try:
        async with asyncio.timeout(WAIT_S):
            while piece := await reader.read(_PIECE):
                received += piece
    except TimeoutError:
        pass
    return received


async def _plaintext(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, chance: random.Random
) -> bytes:
    """What is not TLS: a request, HTTP, or anything."""
    writer.write(
        chance.choice(
            (
                struct.pack(">ihhih", 10, 18, 0, 1, -1),
                struct.pack(">ihhih", 14, 3, 0, 1, -1) + struct.pack(">i", 0),
                b"GET / HTTP/1.1\r\n\r\n",
                chance.randbytes(chance.randint(1, 2_000)),
                bytes((_HANDSHAKE, 3, 1)) + struct.pack(">H", 0xFFFF) + chance.randbytes(500),
            )
        )
    )
    writer.write_eof()
    return await _rest(reader)


def _client(context: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return context.wrap_bio(incoming, outgoing, server_hostname="localhost"), incoming, outgoing


def _damaged(message: bytes, chance: random.Random, first: int = 0) -> bytes:
    damaged = bytearray(message)
    for _ in range(chance.randint(1, 5)):
        damaged[chance.randrange(first, len(damaged))] = chance.getrandbits(8)
    if chance.random() < 0.2:
        del damaged[chance.randrange(1, len(damaged)) :]
    return bytes(damaged)


async def _damaged_hello(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, chance: random.Random
) -> bytes:
    client, _, outgoing = _client(context)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        writer.write(_damaged(outgoing.read(), chance))
    writer.write_eof()
    return await _rest(reader)


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.MemoryBIO, bytes]:
    """Returns the client's last flight, which was not sent yet."""
    client, incoming, outgoing = _client(context)
    async with asyncio.timeout(WAIT_S * 10):
        while True:
            try:
                client.do_handshake()
                return client, incoming, outgoing.read()
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                piece = await reader.read(_PIECE)
                if not piece:
                    raise ConnectionError("closed during the handshake") from None
                incoming.write(piece)


async def _damaged_finish(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, chance: random.Random
) -> bytes:
    _, _, flight = await _shake_hands(reader, writer, context)
    writer.write(_damaged(flight, chance))
    writer.write_eof()
    return await _rest(reader)


async def _unencrypted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, chance: random.Random
) -> bytes:
    """Records behind a good handshake that are not encrypted with its keys."""
    client, incoming, flight = await _shake_hands(reader, writer, context)
    body = chance.randbytes(chance.choice((0, 1, 17, 300, 16_640)))
    kind = chance.choice((_ALERT, _HANDSHAKE, _APPLICATION_DATA, chance.getrandbits(8)))
    writer.write(flight + struct.pack(">BHH", kind, 0x0303, len(body)) + body)
    writer.write_eof()
    incoming.write(await _rest(reader))
    try:
        return client.read(_PIECE)
    except ssl.SSLError:
        return b""
