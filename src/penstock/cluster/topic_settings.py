"""The settings of a topic: Kafka's names, types, bounds and defaults, and the node settings behind them."""

import re
from typing import Final

from penstock.cluster.declaring import Declare, NodeSynonym
from penstock.protocol.settings import Setting, SettingType, Value

_INT, _LONG, _DOUBLE = SettingType.INT, SettingType.LONG, SettingType.DOUBLE
_STRING, _LIST, _BOOLEAN = SettingType.STRING, SettingType.LIST, SettingType.BOOLEAN
_LONG_MAX = (1 << 63) - 1
_WEEK_MS = 7 * 24 * 3_600_000
_MINUTES, _HOURS = 60_000, 3_600_000

LEADER_THROTTLED: Final = "leader.replication.throttled.replicas"
FOLLOWER_THROTTLED: Final = "follower.replication.throttled.replicas"
_THROTTLED = re.compile(r"\d+:\d+")


def _throttled_replicas_flaw(value: Value) -> str | None:
    if value in (("*",), ("none",)):
        return None
    assert isinstance(value, tuple)
    if all(_THROTTLED.fullmatch(item) for item in value):
        return None
    return "must be '*', 'none' or a list of [partitionId]:[brokerId]"


def _gzip_level_flaw(value: Value) -> str | None:
    return None if value == -1 or value != 0 else "must be -1 or from 1 to 9"


_CHECKS = {
    "compression.gzip.level": _gzip_level_flaw,
    LEADER_THROTTLED: _throttled_replicas_flaw,
    FOLLOWER_THROTTLED: _throttled_replicas_flaw,
}

#: In the order they are looked at; the first that is set counts.
NODE_SYNONYMS: Final[dict[str, tuple[NodeSynonym, ...]]] = {
    "cleanup.policy": (NodeSynonym("log.cleanup.policy"),),
    "compression.type": (NodeSynonym("compression.type"),),
    "compression.gzip.level": (NodeSynonym("compression.gzip.level"),),
    "compression.lz4.level": (NodeSynonym("compression.lz4.level"),),
    "compression.zstd.level": (NodeSynonym("compression.zstd.level"),),
    "delete.retention.ms": (NodeSynonym("log.cleaner.delete.retention.ms"),),
    "file.delete.delay.ms": (NodeSynonym("log.segment.delete.delay.ms"),),
    "flush.messages": (NodeSynonym("log.flush.interval.messages"),),
    "flush.ms": (NodeSynonym("log.flush.interval.ms"), NodeSynonym("log.flush.scheduler.interval.ms")),
    "index.interval.bytes": (NodeSynonym("log.index.interval.bytes"),),
    "local.retention.bytes": (NodeSynonym("log.local.retention.bytes"),),
    "local.retention.ms": (NodeSynonym("log.local.retention.ms"),),
    "max.compaction.lag.ms": (NodeSynonym("log.cleaner.max.compaction.lag.ms"),),
    "max.message.bytes": (NodeSynonym("message.max.bytes"),),
    "message.timestamp.after.max.ms": (NodeSynonym("log.message.timestamp.after.max.ms"),),
    "message.timestamp.before.max.ms": (NodeSynonym("log.message.timestamp.before.max.ms"),),
    "message.timestamp.type": (NodeSynonym("log.message.timestamp.type"),),
    "min.cleanable.dirty.ratio": (NodeSynonym("log.cleaner.min.cleanable.ratio"),),
    "min.compaction.lag.ms": (NodeSynonym("log.cleaner.min.compaction.lag.ms"),),
    "min.insync.replicas": (NodeSynonym("min.insync.replicas"),),
    "preallocate": (NodeSynonym("log.preallocate"),),
    "retention.bytes": (NodeSynonym("log.retention.bytes"),),
    "retention.ms": (
        NodeSynonym("log.retention.ms"),
        NodeSynonym("log.retention.minutes", _MINUTES),
        NodeSynonym("log.retention.hours", _HOURS),
    ),
    "segment.bytes": (NodeSynonym("log.segment.bytes"),),
    "segment.index.bytes": (NodeSynonym("log.index.size.max.bytes"),),
    "segment.jitter.ms": (
        NodeSynonym("log.roll.jitter.ms"),
        NodeSynonym("log.roll.jitter.hours", _HOURS),
    ),
    "segment.ms": (NodeSynonym("log.roll.ms"), NodeSynonym("log.roll.hours", _HOURS)),
    "unclean.leader.election.enable": (NodeSynonym("unclean.leader.election.enable"),),
    "penstock.flush": (NodeSynonym("penstock.flush"),),
    "penstock.flush.interval.ms": (NodeSynonym("penstock.flush.interval.ms"),),
}

_topic = Declare(NODE_SYNONYMS, _CHECKS)

_SEGMENTS = (
    _topic("segment.bytes", _INT, 1 << 30, "Size at which a new segment file begins.", 14),
    _topic("segment.ms", _LONG, _WEEK_MS, "Age at which a new segment file begins.", 1),
    _topic("segment.jitter.ms", _LONG, 0, "Accepted for compatibility; segments roll without jitter.", 0),
    _topic("segment.index.bytes", _INT, 10 << 20, "Largest offset index of a segment.", 4),
    _topic("index.interval.bytes", _INT, 4096, "Log bytes between two entries of the offset index.", 0),
    _topic(
        "preallocate", _BOOLEAN, False, "Accepted for compatibility; segment files are never preallocated."
    ),
    _topic("file.delete.delay.ms", _LONG, 60_000, "Wait before a removed segment file is erased.", 0),
)

_RETENTION = (
    _topic(
        "cleanup.policy",
        _LIST,
        ("delete",),
        "What happens to old records: delete removes segments past retention, compact keeps the latest value "
        "of each key; both may be given.",
        choices=("compact", "delete"),
    ),
    _topic("retention.ms", _LONG, _WEEK_MS, "How long records are kept under delete; -1 for ever.", -1),
    _topic(
        "retention.bytes",
        _LONG,
        -1,
        "Size a partition may reach before old segments go; -1 has no bound.",
        -1,
    ),
    _topic("delete.retention.ms", _LONG, 86_400_000, "How long compaction keeps tombstones.", 0),
    _topic("min.compaction.lag.ms", _LONG, 0, "Age before a record may be compacted.", 0),
    _topic("max.compaction.lag.ms", _LONG, _LONG_MAX, "Age by which a record is compacted.", 1),
    _topic(
        "min.cleanable.dirty.ratio",
        _DOUBLE,
        0.5,
        "Uncompacted share of the log at which it is compacted.",
        0,
        1,
    ),
    _topic("local.retention.ms", _LONG, -2, "As retention.ms for tiered storage; -2 is retention.ms.", -2),
    _topic("local.retention.bytes", _LONG, -2, "As retention.bytes for tiered storage; -2 follows it.", -2),
    _topic("remote.storage.enable", _BOOLEAN, False, "Tiered storage, which this cluster does not have."),
    _topic("remote.log.copy.disable", _BOOLEAN, False, "Of tiered storage: nothing more is copied to it."),
    _topic("remote.log.delete.on.disable", _BOOLEAN, False, "Of tiered storage: erase it when disabled."),
)

_MESSAGES = (
    _topic("max.message.bytes", _INT, 1_048_588, "Largest record batch, after compression.", 0),
    _topic(
        "message.timestamp.type",
        _STRING,
        "CreateTime",
        "Whether a record carries its creation time or the time of its append.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    _topic(
        "message.timestamp.before.max.ms", _LONG, _LONG_MAX, "How far a timestamp may lie in the past.", 0
    ),
    _topic(
        "message.timestamp.after.max.ms", _LONG, 3_600_000, "How far a timestamp may lie in the future.", 0
    ),
    _topic(
        "compression.type",
        _STRING,
        "producer",
        "Codec that batches are stored with; `producer` keeps what was sent.",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
    ),
    _topic(
        "compression.gzip.level",
        _INT,
        -1,
        "Accepted for compatibility; the broker uses the codec's own level.",
        -1,
        9,
    ),
    _topic(
        "compression.lz4.level",
        _INT,
        9,
        "Accepted for compatibility; the broker uses the codec's own level.",
        1,
        17,
    ),
    _topic(
        "compression.zstd.level",
        _INT,
        3,
        "Accepted for compatibility; the broker uses the codec's own level.",
        -(1 << 17),
        22,
    ),
)

_SCHEDULE = (
    _topic(
        "penstock.schedule.enable",
        _BOOLEAN,
        False,
        "Hold records with a penstock-deliver-at or penstock-deliver-after header back until they are due.",
    ),
    _topic(
        "penstock.delivery.contract",
        _STRING,
        "none",
        "The delivery contract that applications and pipelines must keep which subscribe to the topic; those that "
        "promise less refuse to start. Other clients do not look at it.",
        choices=("none", "at-most-once", "at-least-once", "effectively-once", "exactly-once"),
    ),
)

_DURABILITY = (
    _topic("min.insync.replicas", _INT, 1, "Replicas that must hold a write before acks=all is answered.", 1),
    _topic(
        "unclean.leader.election.enable", _BOOLEAN, False, "Let a replica that may lack data become leader."
    ),
    _topic(
        "penstock.flush",
        _STRING,
        "ack",
        "When data is synced to disk: before acks=all is answered (ack), every penstock.flush.interval.ms "
        "(interval), or when the operating system likes (never).",
        choices=("ack", "interval", "never"),
    ),
    _topic("penstock.flush.interval.ms", _LONG, 1000, "How often, where penstock.flush=interval.", 1),
    _topic("flush.messages", _LONG, _LONG_MAX, "Records after which the log is synced in any case.", 1),
    _topic("flush.ms", _LONG, _LONG_MAX, "Time after which the log is synced in any case.", 0),
    _topic(
        LEADER_THROTTLED,
        _LIST,
        (),
        "Leaders that send within leader.replication.throttled.rate to followers that are not in sync: "
        "[partition]:[broker], comma separated, or * for all.",
    ),
    _topic(
        FOLLOWER_THROTTLED,
        _LIST,
        (),
        "Followers that fetch within follower.replication.throttled.rate while they are not in sync: "
        "[partition]:[broker], comma separated, or * for all.",
    ),
)

TOPIC_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting
    for section in (_SEGMENTS, _RETENTION, _MESSAGES, _SCHEDULE, _DURABILITY)
    for setting in section
}
