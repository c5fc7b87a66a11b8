"""Requests that parse, of every API and version, whose values no honest client would send.

Names, ids and epochs are mostly real ones, so that requests reach the state behind the parser; numbers are often at
the limits of their type. Ids of members and producers are learned from the answers. Topics and groups of the
well-behaved client (`calm...`) are never named, and requests that may delete or reconfigure a topic leave out the one
that it shares with the attacker (FIELD): such damage is legal. Of ten requests three change settings: see
tests/fuzz/settings.py.
"""

import datetime
import struct
import uuid
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from kio.index import load_response_schema
from kio.serial import entity_reader
from tests.fuzz.messages import TOPIC_IDS, WIDTHS, Requests
from tests.fuzz.settings import CLIENT_IDS, LIMITING, SUBSCRIPTIONS, Settings

from penstock.broker.coordinators.schedule.messages import (
    ScheduleOperation,
    ScheduleRequest,
    ScheduleSource,
    SourcePosition,
    encode_request,
)
from penstock.broker.network.apis import APIS, PRIVATE_APIS, SCHEDULE_API, Api
from penstock.cluster.image import ResourceType
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    ATTRIBUTES_OFFSET,
    BATCH_HEADER,
    CRC_OFFSET,
    BatchHeader,
    Record,
    crc32c,
    encode_batch,
)
from penstock.protocol.share_failures import ShareFailures, WorkerError, WorkerFailure, encode_share_failures

NO_ID = uuid.UUID(int=0)
#: A topic that hostile and honest clients write to and read from.
FIELD = "field"
METADATA = "__cluster_metadata"
INTERNAL = (METADATA, "__consumer_offsets", "__transaction_state", "__share_group_state")
TOPICS = ("prey-a", "prey-b", "prey-compacted", "prey-new-1", "prey-new-2", "no such topic!", "", "x" * 300)
GROUPS = ("prey-classic", "prey-consumer", "prey-share", "prey-new", "", "g" * 300)
TRANSACTIONAL_IDS = ("prey-txn-1", "prey-txn-2", "", "t" * 300)
MEMBERS = ("", "prey-member", "unknown", "m" * 300)
CONFIG_NAMES = ("cleanup.policy", "retention.ms", "segment.bytes", "compression.type", "unknown.name")
CONFIG_VALUES = (
    "", "0", "-1", "1", "9223372036854775807", "-9223372036854775808", "1e9", "compact", "delete", "zstd", "true", "\0",
)  # fmt: skip
FEATURES = ("share.version", "transaction.version", "group.version", "no.such.feature")
OTHER_NAMES = ("range", "consumer", "uniform", "PLAINTEXT", "", "127.0.0.1", "y" * 300)
SMALL = (0, 0, 1, 1, 2, 3, 10)
#: How likely a number is at the limits, drawn for each request: where all of them are, it ends at the first check.
HOSTILITIES = (0.1, 0.2, 0.5)
INT8, INT16, INT32, INT64 = (2**7 - 1, 2**15 - 1, 2**31 - 1, 2**63 - 1)
#: Every request that a node knows.
TABLE = {**APIS, **PRIVATE_APIS}
#: Times that the node accepts for sessions and transactions, and those that end a wait before the fuzzer does.
TIMES_MS = (1, 10, 6_000, 10_000, 60_000)
WAITS_MS = (-1, 0, 1, 5, 10)
#: Requests whose answers name a member, and InitProducerId.
JOINING = frozenset({11, 68, 76, 88})
INIT_PRODUCER_ID = 22
#: Requests about the metadata log, and those by which any client may delete, reconfigure or move a topic.
QUORUM = frozenset({52, 53, 54, 55, 59})
DAMAGING = frozenset({20, 21, 33, 37, 44, 45})
#: AlterConfigs and IncrementalAlterConfigs, and how often a request is one of these or CreateTopics.
CHANGING_SETTINGS = (33, 44)
SETTINGS_SHARE = 0.3
QUOTA_ENTITIES = ("user", "user", "client-id", "client-id", "ip", "", "no such type")
QUOTA_NAMES = ("prey-user", "prey-client", "192.0.2.1", "", "u" * 300)
QUOTAS = ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate",
          "connection_creation_rate", "no_such_quota", "")  # fmt: skip
#: Characters, of at most three bytes, that a string may have in versions that are not flexible.
LEGACY_STRING_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What any client can learn by asking."""

    cluster_id: str = ""
    topic_ids: tuple[uuid.UUID, ...] = ()
    field_id: uuid.UUID = NO_ID
    node_ids: tuple[int, ...] = (1,)


class HostileRequests(Requests):
    """`frame` returns frames that parse; `learn` takes the answers to them."""

    def __init__(self, seed: int, knows: Knowledge) -> None:
        super().__init__(seed)
        self.knows = knows
        self._member_ids: deque[str] = deque(maxlen=20)
        self._producer_ids: deque[int] = deque((0, 1, 2, 3), maxlen=10)
        self._hostility = 0.0
        self._topics: tuple[str, ...] = TOPICS
        self._topic_ids: tuple[uuid.UUID, ...] = TOPIC_IDS
        self._settings = Settings(self.chance)
        self._changes_settings = False
        #: Resources of brokers for which a setting that limits clients was sent.
        self.limited: set[tuple[str, str]] = set()

    def frame(self) -> tuple[int, int, bytes]:  # type: ignore[override]
        """The API key, the version, and the frame with its size prefix."""
        chance = self.chance
        api = self._chosen_api()
        self._changes_settings = api.key in CHANGING_SETTINGS
        version = chance.choice(
            (api.min_version, api.max_version, chance.randint(api.min_version, api.max_version))
        )
        self._hostility = chance.choice(HOSTILITIES)
        self._aim(api)
        if api.key in PRIVATE_APIS:
            message = struct.pack(">hhih", api.key, version, 1, -1) + self._private_body(api.key)
        else:
            message = self._header(api.key, version) + self._body(api.key, version)
        return api.key, version, struct.pack(">i", len(message)) + message

    def _chosen_api(self) -> Api:
        if self.chance.random() < SETTINGS_SHARE:
            return TABLE[self.chance.choice((*CHANGING_SETTINGS, 44, 19))]
        return self.chance.choice(list(TABLE.values()))

    def _aim(self, api: Api) -> None:
        """Choose the topics that a request of this API may name."""
        self._topics, self._topic_ids = TOPICS, (*self.knows.topic_ids, *TOPIC_IDS, uuid.UUID(int=2**128 - 1))
        if api.key in QUORUM:
            self._topics = (METADATA, METADATA, METADATA, "", FIELD)
        elif api.key not in DAMAGING:
            self._topics += (FIELD, FIELD, FIELD, *INTERNAL)
            self._topic_ids += (self.knows.field_id, self.knows.field_id)

    def _client_id(self) -> str:
        return self.chance.choice(CLIENT_IDS)

    def learn(self, api_key: int, version: int, reply: bytes) -> None:
        """Takes the ids of members and producers that a node has given out."""
        if api_key not in JOINING and api_key != INIT_PRODUCER_ID:
            return
        schema = load_response_schema(api_key, version)
        _, position = entity_reader(schema.__header_schema__)(reply, 0)
        answer, _ = entity_reader(schema)(reply, position)
        if api_key == INIT_PRODUCER_ID:
            if answer.producer_id >= 0:
                self._producer_ids.append(answer.producer_id)
        elif answer.member_id:
            self._member_ids.append(answer.member_id)

    def _private_body(self, api_key: int) -> bytes:
        chance = self.chance
        topic_id, partition = chance.choice(self._topic_ids), self._number("partition", 32)
        if api_key == SCHEDULE_API:
            at = SourcePosition(
                *(self._number(name, 64 if name == "offset" else 32) for name in SourcePosition._fields)
            )
            return encode_request(
                ScheduleRequest(
                    chance.choice(list(ScheduleOperation)), ScheduleSource(topic_id, partition), at, []
                )
            )
        errors = (None, WorkerError("E", "m" * 300, ""))
        failures = [
            WorkerFailure(
                self._number("offset", 64),
                self._number("count", 16),
                self._number("delay", 64),
                chance.choice(errors),
            )
            for _ in range(self._count())
        ]
        return encode_share_failures(ShareFailures(self._string("group"), topic_id, partition, failures))

    def _count(self) -> int:
        return self.chance.choice((0, 1, 1, 1, 1, 2))

    def _entity(self, schema: type[Any]) -> Any:
        entity = super()._entity(schema)
        if hasattr(entity, "entity_type"):
            # Quotas of others only: a limit of all clients is legal damage.
            kind = self.chance.choice(QUOTA_ENTITIES)
            entity = replace(entity, entity_type=kind)
            if hasattr(entity, "entity_name"):
                entity = replace(entity, entity_name=self.chance.choice(QUOTA_NAMES))
        if hasattr(entity, "remove") and hasattr(entity, "key"):
            entity = replace(entity, key=self.chance.choice(QUOTAS))
        if hasattr(entity, "resource_type"):
            kind = self._settings.kind() if self.chance.random() < 0.95 else self.chance.choice((0, INT8))
            entity = replace(entity, resource_type=kind, resource_name=self._resource_name(kind))
            if self._changes_settings:
                entity = replace(entity, configs=self._config_changes(schema, kind, entity.resource_name))
        elif schema.__name__ == "CreatableTopic":
            entity = replace(entity, configs=self._config_changes(schema, ResourceType.TOPIC, entity.name))
        return entity

    def _resource_name(self, kind: int) -> str:
        match kind:
            case ResourceType.BROKER | ResourceType.BROKER_LOGGER:
                names: tuple[str, ...] = (*map(str, self.knows.node_ids), "", "", "4", "9" * 300, "x", "-1")
            case ResourceType.GROUP:
                names = GROUPS
            case ResourceType.CLIENT_METRICS:
                names = SUBSCRIPTIONS
            case _:
                names = TOPICS
        return names[0] if self.chance.random() < 0.3 else self.chance.choice(names)

    def _config_changes(self, schema: type[Any], kind: int, resource: str) -> tuple[Any, ...]:
        """As the entities that the version of the request has for them."""
        (entries,) = (field for field in fields(schema) if field.name == "configs")
        entry = get_args(entries.type)[0]
        made = []
        for change in self._settings.changes(kind):
            if kind == ResourceType.BROKER and change.name in LIMITING:
                self.limited.add((resource, change.name))
            value = change.value
            if value is not None and not schema.__flexible__:
                value = value[:LEGACY_STRING_MAX]
            given = {"name": change.name, "value": value, "config_operation": change.op}
            made.append(entry(**{field.name: given[field.name] for field in fields(entry)}))
        return tuple(made)

    def _primitive(self, name: str, kafka_type: str) -> Any:
        match kafka_type:
            case "string":
                return self._string(name)
            case "uuid":
                return self.chance.choice(self._topic_ids)
            case "bool" if name == "validate_only":
                return self.chance.random() < 0.1
            case "int8" | "int16" | "int32" | "int64":
                return self._number(name, WIDTHS[kafka_type])
            case "timedelta_i32":
                return datetime.timedelta(milliseconds=self._milliseconds(name))
            case _:
                return super()._primitive(name, kafka_type)

    def _string(self, name: str) -> str:
        chance, knows = self.chance, self.knows
        for part, values in (
            ("group_id", GROUPS),
            ("group", GROUPS),
            ("transactional", TRANSACTIONAL_IDS),
            ("member", self._members()),
            ("instance", MEMBERS),
            ("cluster", (knows.cluster_id, "", "another-cluster")),
            ("topic", self._topics),
            ("resource_name", (*TOPICS, *GROUPS)),
            ("config", CONFIG_NAMES),
            ("value", CONFIG_VALUES),
            ("feature", FEATURES),
            ("key", (*GROUPS, *TRANSACTIONAL_IDS, "prey-share:" + str(uuid.UUID(int=1)) + ":0")),
        ):
            if part in name:
                return values[0] if chance.random() < 0.5 else chance.choice(values)
        return chance.choice((*self._topics, *self._topics, *GROUPS, *CONFIG_NAMES, *FEATURES, *OTHER_NAMES))

    def _members(self) -> tuple[str, ...]:
        """The first is the most likely one: a member that there is, or one that joins."""
        known = tuple(self._member_ids)
        return (*known[-1:], *MEMBERS, *known) if self.chance.random() < 0.7 else MEMBERS

    def _number(self, name: str, bits: int) -> int:
        chance, limit = self.chance, (1 << bits - 1) - 1
        if chance.random() < self._hostility:
            value = chance.choice((-1, -2, -3, limit, limit - 1, limit // 2, -limit - 1))
        elif "partition" in name or "index" in name:
            value = chance.choice((0, 0, 0, 1, 2))
        elif any(
            part in name for part in ("broker", "replica_id", "node", "leader_id", "candidate", "voter")
        ):
            value = chance.choice((*self.knows.node_ids, *self.knows.node_ids, 4))
        elif "producer_id" in name:
            value = chance.choice(self._producer_ids)
        else:
            value = chance.choice(SMALL)
        return max(-limit - 1, min(limit, value))

    def _milliseconds(self, name: str) -> int:
        if "wait" in name and self.chance.random() < 0.9:
            return self.chance.choice(WAITS_MS)
        if self.chance.random() < self._hostility:
            return self.chance.choice((-1, 0, INT32, INT32 - 1, -INT32 - 1))
        return self.chance.choice(TIMES_MS)

    def _records(self) -> bytes:
        """One batch with a good checksum, and one or two fields of its header that lie."""
        chance = self.chance
        records = [
            Record(number, 1_700_000_000_000, chance.choice((None, b"k")), b"hostile")
            for number in range(chance.randint(1, 4))
        ]
        batch = bytearray(
            encode_batch(
                records,
                codec=chance.choice((Codec.NONE, *Codec)),
                producer_id=chance.choice((-1, *self._producer_ids)),
                producer_epoch=chance.choice((-1, 0, 1, INT16)),
                base_sequence=chance.choice((-1, 0, 1, 5, INT32)),
                attributes=chance.choice((0, 0, 0x08, 0x10, 0x20, 0x40)),
            )
        )
        header = BatchHeader._make(BATCH_HEADER.unpack_from(batch))
        for _ in range(chance.randint(0, 2)):
            header = header._replace(**chance.choice(_LIES))
        BATCH_HEADER.pack_into(batch, 0, *header)
        struct.pack_into(">I", batch, CRC_OFFSET, crc32c(memoryview(batch)[ATTRIBUTES_OFFSET:]))
        return bytes(batch)


_LIES: tuple[dict[str, int], ...] = (
    {"base_offset": INT64},
    {"base_offset": -1},
    {"leader_epoch": INT32},
    {"last_offset_delta": INT32},
    {"last_offset_delta": -1},
    {"record_count": INT32},
    {"record_count": -1},
    {"record_count": 0},
    {"record_count": INT32, "last_offset_delta": INT32 - 1},
    {"base_timestamp": INT64},
    {"max_timestamp": INT64},
    {"max_timestamp": -INT64 - 1},
    {"producer_id": INT64},
    {"producer_epoch": INT16},
    {"base_sequence": INT32},
    {"attributes": 0x7F},
    {"magic": 1},
)
