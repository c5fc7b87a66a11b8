"""Random requests of every API and version we serve: well-formed ones, and what is left of them after damage."""

import datetime
import io
import random
import struct
import uuid
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from penstock.broker.network.apis import APIS
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import Record, encode_batch

#: Few names, so that random requests meet each other's topics and groups.
NAMES = (
    "a",
    "b",
    "orders",
    "group-1",
    "group-2",
    "consumer",
    "range",
    "",
    "x" * 300,
    "ungültig",
    "__consumer_offsets",
)
INTEGERS = (-1, 0, 1, 2, 3, 100, 2**15 - 1, -(2**15))
WIDTHS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
TOPIC_IDS = tuple(uuid.UUID(int=n) for n in range(1, 4))
ELEMENTS_MAX = 3
MADE_MAX = 20_000


class Requests:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._made: list[bytes] = []

    def frame(self) -> bytes:
        """One frame with its size prefix, damaged more often than not."""
        message = self._well_formed()
        if self.chance.random() < 0.5:
            message = self._damaged(message)
        size = (
            len(message) if self.chance.random() < 0.98 else self.chance.choice((0, 3, len(message) // 2, -5))
        )
        return struct.pack(">i", size) + message

    def _well_formed(self) -> bytes:
        """Mostly one made before: building a message costs far more than serving it."""
        if len(self._made) == MADE_MAX or self.chance.random() < len(self._made) / MADE_MAX:
            return self.chance.choice(self._made)
        api = self.chance.choice(list(APIS.values()))
        version = self.chance.randint(api.min_version, api.max_version)
        self._made.append(self._header(api.key, version) + self._body(api.key, version))
        return self._made[-1]

    def _header(self, api_key: int, version: int) -> bytes:
        header = struct.pack(">hhi", api_key, version, self.chance.getrandbits(31))
        client_id = self._client_id().encode()
        header += (
            struct.pack(">h", len(client_id)) + client_id
            if self.chance.random() < 0.8
            else struct.pack(">h", -1)
        )
        return header + (b"\x00" if load_request_schema(api_key, version).__flexible__ else b"")

    def _client_id(self) -> str:
        return "fuzz"

    def _body(self, api_key: int, version: int) -> bytes:
        schema = load_request_schema(api_key, version)
        out = io.BytesIO()
        entity_writer(schema)(out, self._entity(schema))
        return out.getvalue()

    def _entity(self, schema: type[Any]) -> Any:
        return schema(
            **{field.name: self._value(field.name, field.type, field.metadata) for field in fields(schema)}
        )

    def _value(self, name: str, annotation: Any, metadata: Any) -> Any:
        if get_origin(annotation) is UnionType:
            if self.chance.random() < 0.2 and "tag" not in metadata:
                return None
            (annotation,) = (a for a in get_args(annotation) if a is not type(None))
        if get_origin(annotation) is tuple:
            return tuple(self._value(name, get_args(annotation)[0], metadata) for _ in range(self._count()))
        if is_dataclass(annotation):
            return self._entity(annotation)  # type: ignore[arg-type]
        return self._primitive(name, metadata["kafka_type"])

    def _count(self) -> int:
        return self.chance.randint(0, ELEMENTS_MAX)

    def _primitive(self, name: str, kafka_type: str) -> Any:
        chance = self.chance
        match kafka_type:
            case "int8" | "int16" | "int32" | "int64":
                return self._integer(WIDTHS[kafka_type])
            case "bool":
                return chance.random() < 0.5
            case "string":
                return chance.choice(NAMES)
            case "uuid":
                return chance.choice(TOPIC_IDS)
            case "bytes":
                return chance.randbytes(chance.randint(0, 40))
            case "records":
                return self._records()
            case "timedelta_i32" | "timedelta_i64":
                # Short, so that a long poll does not outlive the run.
                return datetime.timedelta(milliseconds=chance.choice((-1, 0, 1, 5, 10)))
            case "datetime_i64":
                return datetime.datetime.fromtimestamp(chance.randint(0, 2**31), tz=datetime.UTC)
            case "error_code":
                return ErrorCode.none
            case "float64":
                return chance.random()
            case _:
                return chance.getrandbits(8)

    def _integer(self, bits: int) -> int:
        if self.chance.random() < 0.8:
            value = self.chance.choice(INTEGERS)
        else:
            value = self.chance.getrandbits(bits) - (1 << bits - 1)
        return max(-(1 << bits - 1), min((1 << bits - 1) - 1, value))

    def _records(self) -> bytes:
        chance = self.chance
        records = [
            Record(
                place,
                chance.randint(0, 2**40),
                chance.choice((None, b"k")),
                chance.randbytes(chance.randint(0, 50)),
            )
            for place in range(chance.randint(1, 4))
        ]
        batch = encode_batch(
            records,
            codec=chance.choice(list(Codec)),
            producer_id=chance.choice((-1, -1, 1, 2)),
            producer_epoch=chance.choice((-1, 0, 1)),
            base_sequence=chance.choice((-1, 0, 1, 5)),
            attributes=chance.choice((0, 0, 0x08, 0x10, 0x20)),
        )
        return self._damaged(bytes(batch)) if chance.random() < 0.5 else bytes(batch)

    def _damaged(self, message: bytes) -> bytes:
        chance, damaged = self.chance, bytearray(message)
        match chance.randint(0, 4):
            case 0:
                for _ in range(chance.randint(1, 8)):
                    damaged[chance.randrange(len(damaged))] = chance.getrandbits(8)
            case 1:
                del damaged[chance.randrange(len(damaged)) :]
            case 2:
                place = chance.randrange(len(damaged))
                damaged[place:place] = chance.randbytes(chance.randint(1, 16))
            case 3:
                # What a count or a length looks like, where one may be.
                place = chance.randrange(len(damaged))
                damaged[place : place + 4] = chance.choice(
                    (b"\x7f\xff\xff\xff", b"\xff" * 4, b"\xff\xff\xff\xff\x0f")
                )
            case _:
                place = chance.randrange(len(damaged))
                damaged[place:] = chance.randbytes(chance.randint(0, 64))
        return bytes(damaged)
