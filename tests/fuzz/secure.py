"""`python -m tests.fuzz --secure`: hostile TLS, SASL and security requests against one node with access rules.

The attackers are connections that have not logged in, `mallory`, whom no rule allows anything, and `trudy`, who may
change rules, users and quotas and damages only her prey. After each burst:

- the node has not counted an internal error, has written no traceback, and its memory is bounded;
- no login as another user succeeded, and nothing was served before a login;
- nothing that is planted or hidden was in an answer to mallory, and all that others own is as it was before;
- a well-behaved client logs in over TLS, creates a topic, produces, consumes and ends a transaction; also after
  a restart, with every record that was acknowledged.
"""

import asyncio
import math
import random
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from kio.schema.errors import ErrorCode
from tests.fuzz import protected, tls_records
from tests.fuzz.logins import AUTHENTICATE, HANDSHAKE, MECHANISMS, Answer, Ask, Known, Login, Logins, honest
from tests.fuzz.protected import CALM_USER, MARKERS, TARGET, TRUDY, ProtectedNode
from tests.fuzz.security import Confined, Denied, SecurityRequests
from tests.fuzz.state import CALM, CALM_GROUP, CALM_TRANSACTION, FIELD, MALFORMED, PATIENCE_S, WellBehaved

from penstock.broker.network.apis import PRIVATE_APIS
from penstock.protocol.schemas import response_reader

CONNECTIONS = 16
REQUESTS_PER_CONNECTION = 200
#: Requests that are sent together, before their answers are read.
PIPELINED_MAX = 20
TLS_SHARE = 0.15
#: As long as nothing comes, an answer may still come.
REPLY_WAIT_S = 5.0
MEMORY_GROWTH_MAX_KB = 300 * 1024
API_VERSIONS = 18
BEFORE_LOGIN = frozenset({HANDSHAKE, AUTHENTICATE, API_VERSIONS})
OVERSIZED = (2**31 - 1, 2**20, 600_000, -1, 0, 7)
_HEADER = struct.Struct(">hhi")


class Bypass(AssertionError):
    """Something was served that must not be."""


class Wire:
    """One connection of an attacker."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Counter[str]
    ) -> None:
        self._reader, self._writer, self._seen = reader, writer, seen
        self._id = 0

    def write(self, frame: bytes) -> None:
        if self._writer.is_closing():  # what comes back says so
            return
        self._writer.write(frame)
        self._seen["frames"] += 1

    def ask(self, ask: Ask) -> int:
        """Returns the id that the answer will have."""
        self._id += 1
        header = _HEADER.pack(ask.api_key, ask.version, self._id) + struct.pack(">h", -1)
        if (ask.api_key, ask.version) == (AUTHENTICATE, 2):
            header += b"\0"
        self.write(struct.pack(">i", len(header) + len(ask.body)) + header + ask.body)
        return self._id

    async def answer(self) -> bytes | None:
        """Return the next answer without its size; None if the node closes the connection, or waits for long."""
        try:
            async with asyncio.timeout(REPLY_WAIT_S):
                answer = await self._reader.readexactly(
                    int.from_bytes(await self._reader.readexactly(4), "big")
                )
        except TimeoutError:
            self._seen["without_answer"] += 1
            return None
        except (OSError, asyncio.IncompleteReadError):
            self._seen["cut_off"] += 1
            return None
        self._seen["answered"] += 1
        return answer

    def close(self) -> None:
        self._writer.transport.abort()


class Attack:
    """A burst of frames over several connections at once."""

    def __init__(self, node: ProtectedNode, known: Known, seed: int) -> None:
        self._node = node
        self._known = known
        self._chance = random.Random(seed)
        self._logins = Logins(self._chance, known)
        self.seen: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        knows = protected.knowledge(node, (TARGET, CALM, FIELD))
        self._mallory = Denied(
            self._chance.getrandbits(32),
            knows,
            known.spare_hmac,
            users=known.others,
            topics=(TARGET, CALM, FIELD),
            groups=(CALM_GROUP, CALM_TRANSACTION),
        )
        self._trudy = Confined(self._chance.getrandbits(32), knows)
        self._tls = ssl.create_default_context(cafile=str(node.authority.certificate))
        self._kinds: tuple[tuple[Callable[[], Any], float], ...] = (
            (self._tls_garbage, 0.08),
            (self._before_login, 0.12),
            (self._hostile_login, 0.50),
            (self._as_mallory, 0.20),
            (self._as_trudy, 0.10),
        )

    async def run(self, frames: int) -> None:
        async def attacker() -> None:
            while self.seen["frames"] < frames:
                kinds, weights = zip(*self._kinds, strict=True)
                await self._chance.choices(kinds, weights)[0]()

        await asyncio.gather(*(attacker() for _ in range(CONNECTIONS)))

    async def _connect(self) -> Wire:
        uses_tls = self._chance.random() < TLS_SHARE
        address = self._node.tls_address if uses_tls else self._node.address
        try:
            async with asyncio.timeout(PATIENCE_S):
                streams = await asyncio.open_connection(*address, ssl=self._tls if uses_tls else None)
        except (OSError, TimeoutError) as error:
            raise AssertionError(f"{address} accepts no connections: {error!r}") from error
        self.seen["connections"] += 1
        self.seen["tls_handshakes"] += uses_tls
        return Wire(*streams, self.seen)

    async def _tls_garbage(self) -> None:
        self.seen["connections"] += 1
        received = await tls_records.attack(self._node.tls_address, self._tls, self._chance)
        self.seen["frames"] += 1
        self._check_content(received, "TLS")

    async def _before_login(self) -> None:
        """Requests of every API, sizes that are too large, and bytes that are no request, without a login."""
        wire = await self._connect()
        sent: dict[int, tuple[int, int]] = {}
        for _ in range(self._chance.randint(1, 5)):
            if self._chance.random() < 0.1:
                wire.write(struct.pack(">i", self._chance.choice(OVERSIZED)) + self._chance.randbytes(40))
            else:
                self._send(wire, self._mallory, sent)
        await self._expect_nothing(wire, sent)

    async def _expect_nothing(self, wire: Wire, sent: dict[int, tuple[int, int]]) -> None:
        while (answer := await wire.answer()) is not None:
            self._check_before_login(answer, sent)
        wire.close()

    def _check_before_login(self, answer: bytes, sent: dict[int, tuple[int, int]]) -> None:
        """Only what serves to log in is answered."""
        api, version = sent.get(_id(answer), (-1, -1))
        self._count("anonymous", api, version, answer)
        self._check_content(answer, f"API {api} before a login")
        if api not in BEFORE_LOGIN:
            raise Bypass(f"API {api} version {version} was answered before a login: {answer[:200]!r}")

    async def _hostile_login(self) -> None:
        wire = await self._connect()
        login = self._logins.hostile()
        if await self._log_in(wire, login):
            raise Bypass(f"a login by {login.kind} succeeded")
        sent: dict[int, tuple[int, int]] = {}
        for _ in range(2):
            self._send(wire, self._mallory, sent)
        await self._expect_nothing(wire, sent)

    def _send(self, wire: Wire, requests: SecurityRequests, sent: dict[int, tuple[int, int]]) -> None:
        api, version, frame = requests.frame()
        sent[_id(frame[8:])] = (api, version)
        wire.write(frame)

    async def _log_in(self, wire: Wire, login: Login) -> bool:
        """Whether the last answer says so. Some logins come with a request in the same segment as their messages."""
        answer = Answer(-1)
        sent: dict[int, tuple[int, int]] = {}
        is_impatient = not login.may_succeed and self._chance.random() < 0.2
        asked: Ask | None = next(login.exchange)
        while asked is not None:
            own = wire.ask(asked)
            if is_impatient:
                self._send(wire, self._mallory, sent)
            while (received := await wire.answer()) is not None and _id(received) != own:
                self._check_before_login(received, sent)
            if received is None:
                return False
            self._check_content(received, login.kind)
            answer, last = self._read(asked, received), asked.api_key
            try:
                asked = login.exchange.send(answer)
            except StopIteration:
                # A token that is refused is answered with a challenge, as in RFC 7628.
                return (
                    last == AUTHENTICATE
                    and not answer.error
                    and not answer.auth_bytes.startswith((b"{", b"r="))
                )
        return False

    def _read(self, asked: Ask, answer: bytes) -> Answer:
        response = response_reader(asked.api_key, asked.version)(
            memoryview(answer), 5 if (asked.api_key, asked.version) == (AUTHENTICATE, 2) else 4
        )
        code = response.error_code
        self.answers[f"login {code.name}"] += 1
        return Answer(int(code.value), getattr(response, "auth_bytes", b""))

    async def _as_mallory(self) -> None:
        wire = await self._connect()
        login = self._logins.honest()
        if not await self._log_in(wire, login):
            raise AssertionError(f"mallory cannot log in: {login.kind}")
        await self._requests(wire, "denied", self._mallory, is_denied=True)

    async def _as_trudy(self) -> None:
        wire = await self._connect()
        message = f"\0{TRUDY}\0{self._node.passwords[TRUDY]}".encode()

        def exchange() -> Any:
            yield Ask(HANDSHAKE, 1, b"\0\5PLAIN")
            yield Ask(AUTHENTICATE, 1, struct.pack(">i", len(message)) + message)

        if not await self._log_in(wire, Login("trudy", exchange(), may_succeed=True)):
            raise AssertionError("trudy cannot log in")
        await self._requests(wire, "confined", self._trudy, is_denied=False)

    async def _requests(self, wire: Wire, who: str, requests: SecurityRequests, *, is_denied: bool) -> None:
        left = REQUESTS_PER_CONNECTION
        while left > 0:
            sent: dict[int, tuple[int, int]] = {}
            for _ in range(self._chance.randint(1, PIPELINED_MAX)):
                self._send(wire, requests, sent)
            left -= len(sent)
            # Of Produce with acks=0 there is no answer; ApiVersions comes behind all others.
            last = self._chance.getrandbits(31)
            wire.write(struct.pack(">ihhih", 10, API_VERSIONS, 0, last, -1))
            while True:
                answer = await wire.answer()
                if answer is None:
                    wire.close()
                    return
                if _id(answer) == last:
                    break
                api, version = sent.get(_id(answer), (-1, -1))
                self._count(who, api, version, answer)
                if is_denied:
                    self._check_content(answer, f"API {api} version {version} to mallory")
        wire.close()

    def _count(self, who: str, api: int, version: int, answer: bytes) -> None:
        self.seen[f"answers_{who}"] += 1
        if api < 0 or self._chance.random() < 0.9:  # a tenth, because decoding costs more than the rest
            return
        self.answers[f"{who} {_error(api, version, answer)}"] += 1

    def _check_content(self, answer: bytes, what: str) -> None:
        for marker in MARKERS:
            if marker in answer:
                raise Bypass(f"{what} was answered with {marker!r}: {answer[:500]!r}")


def _id(answer: bytes) -> int:
    """The correlation id that it begins with."""
    return int.from_bytes(answer[:4], "big")


def _error(api: int, version: int, answer: bytes) -> str:
    """The first error of an answer, wherever it is."""
    if api in PRIVATE_APIS:
        return "private"
    reader = response_reader(api, version)
    for position in (4, 5):
        try:
            return _first_error(reader(memoryview(answer), position)) or "none"
        except Exception:
            continue
    return "unreadable"


def _first_error(value: Any) -> str | None:
    if isinstance(value, ErrorCode):
        return None if value is ErrorCode.none else value.name
    if isinstance(value, tuple):
        return next((found for each in value if (found := _first_error(each))), None)
    if is_dataclass(value):
        return next(
            (found for field in fields(value) if (found := _first_error(getattr(value, field.name)))), None
        )
    return None


def run(
    folder: Path, *, frames: int, seed: int, bursts: int, seconds_max: float = math.inf
) -> dict[str, Any]:
    """Raises AssertionError when an invariant does not hold; returns the report."""
    chance = random.Random(seed)
    node = ProtectedNode(folder)
    node.start()
    seen: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    memory: list[int] = []
    attack_s = 0.0
    counted = 0  # malformed frames since the last start
    began = time.monotonic()
    try:
        known = protected.prepare(node)
        settings = node.client_settings(CALM_USER) | {"log_level": 0}
        client = WellBehaved(settings["bootstrap.servers"], 1, security=settings)
        client.prepare()
        client.check()
        for burst in range(bursts):
            before = protected.snapshot(node)
            attack = Attack(node, known, chance.getrandbits(32))
            started = time.monotonic()
            try:
                asyncio.run(attack.run(frames // bursts))
            finally:
                attack_s += time.monotonic() - started
                seen.update(attack.seen)
                answers.update(attack.answers)
            memory.append(node.memory_kb)
            assert memory[-1] - memory[0] < MEMORY_GROWTH_MAX_KB, f"memory grew: {memory} KB"
            metrics = node.check()
            malformed = int(metrics[MALFORMED])
            seen["malformed"] += malformed - counted
            counted = malformed
            _compare(before, protected.snapshot(node))
            client.check()
            is_last = burst == bursts - 1 or time.monotonic() - began >= seconds_max
            if is_last or chance.random() < 0.2:
                before = protected.snapshot(node)
                client.disconnect()
                code = node.kill() if chance.random() < 0.5 else node.stop()
                assert code in (0, -9), f"{node} ended with {code}:\n{''.join(node.output)}"
                node.start()
                client.connect()
                seen["restarts"] += 1
                counted = 0
                _compare(before, protected.snapshot(node))
                client.check()
                memory.clear()
                memory.append(node.memory_kb)
            asyncio.run(_every_mechanism(node, known))
            if is_last:
                break
        client.read_everything()
        node.check()
    except AssertionError as error:
        raise AssertionError(f"after {seen['frames']} frames: {error}") from error
    finally:
        node.kill()
    return {
        "seed": seed,
        **seen,
        "frames_per_s": round(seen["frames"] / attack_s),
        "memory_kb": memory[-1],
        "checks": client.checks,
        "acknowledged_and_read": len(client.acknowledged),
        "seconds": round(time.monotonic() - began, 1),
        "answers": dict(answers.most_common()),
    }


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what, value in before.items():
        old, new = (
            set(map(repr, each.items() if isinstance(each, dict) else each)) for each in (value, after[what])
        )
        if old != new:
            raise Bypass(f"{what}: gone {sorted(old - new)[:5]}, new {sorted(new - old)[:5]}")


async def _every_mechanism(node: ProtectedNode, known: Known) -> None:
    """A user who is honest logs in by each mechanism, and by delegation token."""
    seen: Counter[str] = Counter()
    for mechanism in (*MECHANISMS, "token"):
        reader, writer = await asyncio.open_connection(*node.address)
        wire = Wire(reader, writer, seen)
        name = "SCRAM-SHA-256" if mechanism == "token" else mechanism
        exchange = honest(known, name, "checked", by_token=mechanism == "token")
        ask: Ask | None = next(exchange)
        while ask is not None:
            wire.ask(ask)
            answer = await wire.answer()
            assert answer is not None, f"a login by {mechanism} was cut off"
            response = response_reader(ask.api_key, ask.version)(memoryview(answer), 4)
            assert response.error_code is ErrorCode.none, f"a login by {mechanism} was refused: {response}"
            try:
                ask = exchange.send(Answer(0, getattr(response, "auth_bytes", b"")))
            except StopIteration:
                ask = None
        wire.close()
