"""Requests to other nodes: each reply goes to its request, and every failure is reported."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from kio.schema.api_versions.v0.request import ApiVersionsRequest
from kio.schema.api_versions.v0.response import ApiVersion, ApiVersionsResponse
from tests.ports import free_port
from tests.unit.broker.quorum.quorum_harness import within

from penstock.broker.network.apis import encode_response
from penstock.broker.network.peers import Address, Peers, PeerUnreachable
from penstock.protocol.errors import ErrorCode

API_VERSIONS = 18
Answer = Callable[[bytes], Awaitable[bytes]]


def peers_of(**addresses: Address) -> Peers:
    """The connections of node 7."""
    known = {int(name.removeprefix("n")): at for name, at in addresses.items()}
    return Peers(7, address_of=known.get)


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Address]:
    """One that answers each request in turn; `answer` gets the frame and gives the whole reply."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                reply = await answer(await reader.readexactly(size))
                if not reply:
                    break
                writer.write(reply)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def correlation_id(frame: bytes) -> int:
    return int(struct.unpack_from(">i", frame, 4)[0])


def reply_to(frame: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id(frame)) + body


async def echo(frame: bytes) -> bytes:
    return reply_to(frame, frame[8:])


async def silence(frame: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(frame: bytes) -> bytes:
    return b""


def request(body: bytes) -> bytes:
    return struct.pack(">hhi", 99, 0, 0) + body


async def test_a_message_goes_there_and_its_answer_comes_back() -> None:
    async def answer(frame: bytes) -> bytes:
        versions = (ApiVersion(api_key=1, min_version=4, max_version=17),)
        response = ApiVersionsResponse(error_code=ErrorCode.none, api_keys=versions)
        return encode_response(API_VERSIONS, 0, correlation_id(frame), response)

    async with server(answer) as address:
        peers = peers_of(n3=address)
        response = await within(peers.call(3, API_VERSIONS, ApiVersionsRequest(), version=0, timeout_s=60))
        assert [(int(api.api_key), int(api.max_version)) for api in response.api_keys] == [(1, 17)]
        await peers.close()


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, 64 * 1024 - 12, 64 * 1024, 3_000_000])
async def test_answers_of_every_size_arrive_whole(size: int) -> None:
    async with server(echo) as address:
        peers = peers_of()
        bodies = [bytes([number]) * size for number in range(5)]
        answers = await within(
            asyncio.gather(*(peers.raw(address, request(body), timeout_s=60) for body in bodies))
        )
        assert [bytes(answer[4:]) for answer in answers] == bodies
        await peers.close()


async def test_requests_of_one_purpose_share_a_connection_and_others_do_not_wait_for_them() -> None:
    connections: list[str] = []

    async def answer(frame: bytes) -> bytes:
        kind = frame[8:].decode()
        if kind == "slow":
            return await silence(frame)
        connections.append(kind)
        return reply_to(frame, frame[8:])

    async with server(answer) as address:
        peers = peers_of()
        slow = asyncio.create_task(peers.raw(address, request(b"slow"), timeout_s=60, purpose="fetch"))
        quick = await within(peers.raw(address, request(b"quick"), timeout_s=60, purpose="vote"))
        assert bytes(quick[4:]) == b"quick"
        assert not slow.done()
        await peers.close()
        with pytest.raises(PeerUnreachable):
            await within(slow)


async def test_a_peer_that_is_not_there_has_refused() -> None:
    peers = peers_of()
    with pytest.raises(PeerUnreachable) as error:
        await within(peers.raw(("127.0.0.1", free_port()), request(b""), timeout_s=60))
    assert error.value.refused


async def test_a_peer_that_closes_the_connection_has_refused_and_is_asked_again() -> None:
    answers = iter([hang_up, echo])

    async def answer(frame: bytes) -> bytes:
        return await next(answers)(frame)

    async with server(answer) as address:
        peers = peers_of()
        with pytest.raises(PeerUnreachable) as error:
            await within(peers.raw(address, request(b"x"), timeout_s=60))
        assert error.value.refused
        again = await within(peers.raw(address, request(b"x"), timeout_s=60))
        assert bytes(again[4:]) == b"x"
        await peers.close()


async def test_a_peer_that_is_silent_times_out_and_is_asked_on_a_new_connection() -> None:
    answers = iter([silence, echo])

    async def answer(frame: bytes) -> bytes:
        return await next(answers)(frame)

    async with server(answer) as address:
        peers = peers_of()
        with pytest.raises(TimeoutError, match="no answer from"):
            await within(peers.raw(address, request(b"x"), timeout_s=0.05))
        again = await within(peers.raw(address, request(b"x"), timeout_s=60))
        assert bytes(again[4:]) == b"x"
        await peers.close()


@pytest.mark.parametrize(
    "reply",
    [struct.pack(">i", -1), struct.pack(">i", 2**31 - 1), struct.pack(">ii", 4, 12345)],
    ids=["negative size", "monstrous size", "answer to nothing"],
)
async def test_what_is_no_answer_ends_the_connection(reply: bytes) -> None:
    async def answer(frame: bytes) -> bytes:
        return reply

    async with server(answer) as address:
        peers = peers_of()
        with pytest.raises(PeerUnreachable) as error:
            await within(peers.raw(address, request(b"x"), timeout_s=60))
        assert not error.value.refused
        await peers.close()


async def test_a_damaged_answer_is_no_answer() -> None:
    async def answer(frame: bytes) -> bytes:
        return reply_to(frame, b"\x00\x00\x7f\xff\xff\xff")  # an array of two billion

    async with server(answer) as address:
        peers = peers_of()
        with pytest.raises(PeerUnreachable, match="array of"):
            await within(peers.call(address, API_VERSIONS, ApiVersionsRequest(), version=0, timeout_s=60))
        await peers.close()


async def test_an_unknown_node_is_unreachable() -> None:
    with pytest.raises(PeerUnreachable, match="the address of node 5 is unknown"):
        await peers_of().raw(5, request(b""), timeout_s=60)
