"""The settings of a topic: Kafka's names, types, bounds and defaults, and the node settings behind them.

The effective value of a setting is the one in the strongest layer that sets it; the values in the weaker layers are its
synonyms. Group settings and client metrics subscriptions are declared and resolved in the same way. Leaders and the
controller must agree on what a topic's settings promise (min.insync.replicas, penstock.flush,
unclean.leader.election.enable), so both read them with the functions at the end of this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.protocol.config_def import InvalidSetting, NodeSynonym, Setting, SettingType, SettingValue
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.cluster.image import PartitionState


_INT, _LONG, _DOUBLE = SettingType.INT, SettingType.LONG, SettingType.DOUBLE
_STRING, _LIST, _BOOLEAN = SettingType.STRING, SettingType.LIST, SettingType.BOOLEAN
_LONG_MAX = (1 << 63) - 1
_WEEK_MS = 7 * 24 * 3_600_000
_MINUTES, _HOURS = 60_000, 3_600_000

LEADER_THROTTLED: Final = "leader.replication.throttled.replicas"
FOLLOWER_THROTTLED: Final = "follower.replication.throttled.replicas"
#: A bounded partition consists of eight segments, which must not be tiny.
OVERFLOW_BYTES_MIN: Final = 64 << 10
_THROTTLED = re.compile(r"\d+:\d+")


def _throttled_replicas_flaw(value: SettingValue) -> str | None:
    if value in (("*",), ("none",)):
        return None
    assert isinstance(value, tuple)
    if all(_THROTTLED.fullmatch(item) for item in value):
        return None
    return "must be '*', 'none' or a list of [partitionId]:[brokerId]"


def _overflow_bytes_flaw(value: SettingValue) -> str | None:
    assert isinstance(value, int)
    return (
        None if value == -1 or value >= OVERFLOW_BYTES_MIN else f"must be -1 or at least {OVERFLOW_BYTES_MIN}"
    )


def _overflow_records_flaw(value: SettingValue) -> str | None:
    return None if value != 0 else "must be -1 or at least 1"


def _gzip_level_flaw(value: SettingValue) -> str | None:
    return None if value == -1 or value != 0 else "must be -1 or from 1 to 9"


_SEGMENTS = (
    Setting(
        "segment.bytes",
        _INT,
        1 << 30,
        "Size at which a new segment file begins.",
        14,
        synonyms=(NodeSynonym("log.segment.bytes"),),
    ),
    Setting(
        "segment.ms",
        _LONG,
        _WEEK_MS,
        "Age at which a new segment file begins.",
        1,
        synonyms=(NodeSynonym("log.roll.ms"), NodeSynonym("log.roll.hours", _HOURS)),
    ),
    Setting(
        "segment.jitter.ms",
        _LONG,
        0,
        "Accepted for compatibility; segments roll without jitter.",
        0,
        synonyms=(NodeSynonym("log.roll.jitter.ms"), NodeSynonym("log.roll.jitter.hours", _HOURS)),
    ),
    Setting(
        "segment.index.bytes",
        _INT,
        10 << 20,
        "Largest offset index of a segment.",
        4,
        synonyms=(NodeSynonym("log.index.size.max.bytes"),),
    ),
    Setting(
        "index.interval.bytes",
        _INT,
        4096,
        "Log bytes between two entries of the offset index.",
        0,
        synonyms=(NodeSynonym("log.index.interval.bytes"),),
    ),
    Setting(
        "preallocate",
        _BOOLEAN,
        False,
        "Accepted for compatibility; segment files are never preallocated.",
        synonyms=(NodeSynonym("log.preallocate"),),
    ),
    Setting(
        "file.delete.delay.ms",
        _LONG,
        60_000,
        "Wait before a removed segment file is erased.",
        0,
        synonyms=(NodeSynonym("log.segment.delete.delay.ms"),),
    ),
)

_RETENTION = (
    Setting(
        "cleanup.policy",
        _LIST,
        ("delete",),
        "What happens to old records: delete removes segments past retention, compact keeps the latest value "
        "of each key; both may be given.",
        choices=("compact", "delete"),
        synonyms=(NodeSynonym("log.cleanup.policy"),),
    ),
    Setting(
        "retention.ms",
        _LONG,
        _WEEK_MS,
        "How long records are kept under delete; -1 for ever.",
        -1,
        synonyms=(
            NodeSynonym("log.retention.ms"),
            NodeSynonym("log.retention.minutes", _MINUTES),
            NodeSynonym("log.retention.hours", _HOURS),
        ),
    ),
    Setting(
        "retention.bytes",
        _LONG,
        -1,
        "Size a partition may reach before old segments go; -1 has no bound.",
        -1,
        synonyms=(NodeSynonym("log.retention.bytes"),),
    ),
    Setting(
        "delete.retention.ms",
        _LONG,
        86_400_000,
        "How long compaction keeps tombstones.",
        0,
        synonyms=(NodeSynonym("log.cleaner.delete.retention.ms"),),
    ),
    Setting(
        "min.compaction.lag.ms",
        _LONG,
        0,
        "Age before a record may be compacted.",
        0,
        synonyms=(NodeSynonym("log.cleaner.min.compaction.lag.ms"),),
    ),
    Setting(
        "max.compaction.lag.ms",
        _LONG,
        _LONG_MAX,
        "Age by which a record is compacted.",
        1,
        synonyms=(NodeSynonym("log.cleaner.max.compaction.lag.ms"),),
    ),
    Setting(
        "min.cleanable.dirty.ratio",
        _DOUBLE,
        0.5,
        "Uncompacted share of the log at which it is compacted.",
        0,
        1,
        synonyms=(NodeSynonym("log.cleaner.min.cleanable.ratio"),),
    ),
    Setting(
        "local.retention.ms",
        _LONG,
        -2,
        "As retention.ms for tiered storage; -2 is retention.ms.",
        -2,
        synonyms=(NodeSynonym("log.local.retention.ms"),),
    ),
    Setting(
        "local.retention.bytes",
        _LONG,
        -2,
        "As retention.bytes for tiered storage; -2 follows it.",
        -2,
        synonyms=(NodeSynonym("log.local.retention.bytes"),),
    ),
    Setting("remote.storage.enable", _BOOLEAN, False, "Tiered storage, which this cluster does not have."),
    Setting("remote.log.copy.disable", _BOOLEAN, False, "Of tiered storage: nothing more is copied to it."),
    Setting("remote.log.delete.on.disable", _BOOLEAN, False, "Of tiered storage: erase it when disabled."),
)

_MESSAGES = (
    Setting(
        "max.message.bytes",
        _INT,
        1_048_588,
        "Largest record batch, after compression.",
        0,
        synonyms=(NodeSynonym("message.max.bytes"),),
    ),
    Setting(
        "message.timestamp.type",
        _STRING,
        "CreateTime",
        "Whether a record carries its creation time or the time of its append.",
        choices=("CreateTime", "LogAppendTime"),
        synonyms=(NodeSynonym("log.message.timestamp.type"),),
    ),
    Setting(
        "message.timestamp.before.max.ms",
        _LONG,
        _LONG_MAX,
        "How far a timestamp may lie in the past.",
        0,
        synonyms=(NodeSynonym("log.message.timestamp.before.max.ms"),),
    ),
    Setting(
        "message.timestamp.after.max.ms",
        _LONG,
        3_600_000,
        "How far a timestamp may lie in the future.",
        0,
        synonyms=(NodeSynonym("log.message.timestamp.after.max.ms"),),
    ),
    Setting(
        "compression.type",
        _STRING,
        "producer",
        "Codec that batches are stored with; `producer` keeps what was sent.",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        synonyms=(NodeSynonym("compression.type"),),
    ),
    Setting(
        "compression.gzip.level",
        _INT,
        -1,
        "Accepted for compatibility; the broker uses the codec's own level.",
        -1,
        9,
        check=_gzip_level_flaw,
        synonyms=(NodeSynonym("compression.gzip.level"),),
    ),
    Setting(
        "compression.lz4.level",
        _INT,
        9,
        "Accepted for compatibility; the broker uses the codec's own level.",
        1,
        17,
        synonyms=(NodeSynonym("compression.lz4.level"),),
    ),
    Setting(
        "compression.zstd.level",
        _INT,
        3,
        "Accepted for compatibility; the broker uses the codec's own level.",
        -(1 << 17),
        22,
        synonyms=(NodeSynonym("compression.zstd.level"),),
    ),
)

_SCHEDULE = (
    Setting(
        "penstock.schedule.enable",
        _BOOLEAN,
        False,
        "Hold records with a penstock-deliver-at or penstock-deliver-after header back until they are due.",
    ),
    Setting(
        "penstock.delivery.contract",
        _STRING,
        "none",
        "The delivery contract that applications and pipelines must keep which subscribe to the topic; those that "
        "promise less refuse to start. Other clients do not look at it.",
        choices=("none", "at-most-once", "at-least-once", "effectively-once", "exactly-once"),
    ),
)

OVERFLOW_POLICY: Final = "penstock.overflow"
OVERFLOW_RECORDS: Final = "penstock.overflow.records"
DROP_OLDEST: Final = "drop-oldest"

_OVERFLOW = (
    Setting(
        OVERFLOW_POLICY,
        _STRING,
        "block",
        "What a leader does with a batch for which there is no room within the bounds of the partition, the storage of "
        "its tenant, or on the disk: the producer sends it again until there is (block), gets POLICY_VIOLATION "
        "(reject), the oldest records are deleted (drop-oldest), or the batch is not stored (drop-newest).",
        choices=("block", "reject", DROP_OLDEST, "drop-newest"),
    ),
    Setting(
        "penstock.overflow.bytes",
        _LONG,
        -1,
        "Bytes that a partition may hold; -1 has no bound. Its segments have at most an eighth of it.",
        -1,
        check=_overflow_bytes_flaw,
    ),
    Setting(
        OVERFLOW_RECORDS,
        _LONG,
        -1,
        "Records that a partition may hold, by its offsets; -1 has no bound.",
        -1,
        check=_overflow_records_flaw,
    ),
    Setting(
        "penstock.shed.priority",
        _INT,
        -1,
        "How long the topic keeps all of its new records when the disk or the storage of its tenant runs short: topics "
        "with 0 are shed first, those with 9 last, and those with -1 never.",
        -1,
        9,
    ),
    Setting(
        "penstock.shed.sample",
        _DOUBLE,
        0.0,
        "The share of new records that is kept while the topic is shed.",
        0,
        1,
    ),
)

FLUSH_POLICIES: Final = ("ack", "interval", "never")
FLUSH_DOC: Final = (
    "When data is synced to disk: before acks=all is answered (ack), every penstock.flush.interval.ms "
    "(interval), or when the operating system likes (never)."
)

_DURABILITY = (
    Setting(
        "min.insync.replicas",
        _INT,
        1,
        "Replicas that must hold a write before acks=all is answered.",
        1,
        synonyms=(NodeSynonym("min.insync.replicas"),),
    ),
    Setting(
        "unclean.leader.election.enable",
        _BOOLEAN,
        False,
        "Let a replica that may lack data become leader.",
        synonyms=(NodeSynonym("unclean.leader.election.enable"),),
    ),
    Setting(
        "penstock.flush",
        _STRING,
        "ack",
        FLUSH_DOC,
        choices=FLUSH_POLICIES,
        synonyms=(NodeSynonym("penstock.flush"),),
    ),
    Setting(
        "penstock.flush.interval.ms",
        _LONG,
        1000,
        "How often, where penstock.flush=interval.",
        1,
        synonyms=(NodeSynonym("penstock.flush.interval.ms"),),
    ),
    Setting(
        "flush.messages",
        _LONG,
        _LONG_MAX,
        "Records after which the log is synced in any case.",
        1,
        synonyms=(NodeSynonym("log.flush.interval.messages"),),
    ),
    Setting(
        "flush.ms",
        _LONG,
        _LONG_MAX,
        "Time after which the log is synced in any case.",
        0,
        synonyms=(NodeSynonym("log.flush.interval.ms"), NodeSynonym("log.flush.scheduler.interval.ms")),
    ),
    Setting(
        LEADER_THROTTLED,
        _LIST,
        (),
        "Leaders that send within leader.replication.throttled.rate to followers that are not in sync: "
        "[partition]:[broker], comma separated, or * for all.",
        check=_throttled_replicas_flaw,
    ),
    Setting(
        FOLLOWER_THROTTLED,
        _LIST,
        (),
        "Followers that fetch within follower.replication.throttled.rate while they are not in sync: "
        "[partition]:[broker], comma separated, or * for all.",
        check=_throttled_replicas_flaw,
    ),
)

TOPIC_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting
    for section in (_SEGMENTS, _RETENTION, _MESSAGES, _SCHEDULE, _OVERFLOW, _DURABILITY)
    for setting in section
}


class ConfigSource(IntEnum):
    """Numbered as DescribeConfigs reports them."""

    UNKNOWN = 0
    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    DYNAMIC_BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    GROUP = 8
    TENANT = 64  # our own


class ConfigLayer(NamedTuple):
    """Some settings as text, all from one source."""

    source: ConfigSource
    values: Mapping[str, str]


class ConfigSynonym(NamedTuple):
    name: str
    text: str | None
    source: ConfigSource


class EffectiveSetting(NamedTuple):
    setting: Setting
    value: SettingValue
    source: ConfigSource
    synonyms: tuple[ConfigSynonym, ...]  # the first one applies

    @property
    def text(self) -> str | None:
        return self.setting.text(self.value)


#: For a node that sets nothing: topics use their own defaults.
NO_LAYERS: Final[tuple[ConfigLayer, ...]] = ()


def effective_topic_settings(
    overrides: Mapping[str, str], node: Iterable[ConfigLayer] = NO_LAYERS
) -> dict[str, EffectiveSetting]:
    """Returns every topic setting. `node` is the node's layers, strongest first."""
    layers = tuple(node)
    return {
        name: _effective_topic_setting(setting, overrides, layers) for name, setting in TOPIC_SETTINGS.items()
    }


class TopicSettingsCache:
    """The effective settings of many topics: those with the same overrides share them."""

    def __init__(self, node: Iterable[ConfigLayer]) -> None:
        self._node = tuple(node)
        self._found: dict[frozenset[tuple[str, str]], dict[str, EffectiveSetting]] = {}

    def of(self, overrides: Mapping[str, str]) -> dict[str, EffectiveSetting]:
        key = frozenset(overrides.items())
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = effective_topic_settings(overrides, self._node)
        return found


def effective_setting(
    setting: Setting,
    overrides: Mapping[str, str],
    node: tuple[ConfigLayer, ...],
    *,
    own: ConfigSource,
) -> EffectiveSetting:
    """Returns one setting of any resource: `overrides` are the resource's own values, which come from `own`."""
    behind = tuple(_node_synonyms(setting.synonyms, node))
    if (text := overrides.get(setting.name)) is not None:
        try:
            value = setting.parse(text)
        except InvalidSetting:
            pass  # stored by another version; ignored
        else:
            mine = ConfigSynonym(setting.name, setting.text(value), own)
            return EffectiveSetting(setting, value, own, (mine, *(synonym for synonym, _ in behind)))
    for rank, (strongest, factor) in enumerate(behind):
        assert strongest.text is not None
        try:
            value = _in_unit(setting.parse(strongest.text), factor)
        except InvalidSetting:
            # Older versions accepted node values that no topic can have; a stored one is ignored.
            continue
        return EffectiveSetting(
            setting, value, strongest.source, tuple(synonym for synonym, _ in behind[rank:])
        )
    return EffectiveSetting(setting, setting.default, ConfigSource.DEFAULT, ())


def effective_topic_setting(
    name: str, overrides: Mapping[str, str], node: Iterable[ConfigLayer] = NO_LAYERS
) -> EffectiveSetting:
    return _effective_topic_setting(TOPIC_SETTINGS[name], overrides, tuple(node))


def validate_topic_settings(overrides: Mapping[str, str], node: Iterable[ConfigLayer] = NO_LAYERS) -> None:
    """Checks all of a topic's own settings together. Raises INVALID_CONFIG."""
    for name, text in overrides.items():
        setting = TOPIC_SETTINGS.get(name)
        if setting is None:
            raise ApiError(ErrorCode.invalid_config, f"Unknown topic config name: {name}")
        try:
            setting.parse(text)
        except InvalidSetting as error:
            raise ApiError(ErrorCode.invalid_config, str(error)) from None
    _refuse_contradictions(overrides, tuple(node))


def validate_topic_defaults(values: Mapping[str, str]) -> None:
    """Checks the node settings that topics fall back on. Raises InvalidSetting."""
    for setting in TOPIC_SETTINGS.values():
        for synonym in setting.synonyms:
            if (text := values.get(synonym.name)) is not None:
                setting.parse(text)


def _refuse_contradictions(overrides: Mapping[str, str], node: tuple[ConfigLayer, ...]) -> None:
    low, high = "min.compaction.lag.ms", "max.compaction.lag.ms"
    least, most = (
        _effective_topic_setting(TOPIC_SETTINGS[name], overrides, node).value for name in (low, high)
    )
    assert isinstance(least, int)
    assert isinstance(most, int)
    # Broker defaults that contradict each other are no reason to refuse every topic.
    if least > most and overrides.keys() & {low, high}:
        raise ApiError(
            ErrorCode.invalid_config, f"conflict topic config setting {low} ({least}) > {high} ({most})"
        )
    if _effective_topic_setting(TOPIC_SETTINGS["remote.storage.enable"], overrides, node).value:
        raise ApiError(
            ErrorCode.invalid_config,
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage.",
        )
    _refuse_overflow_contradictions(overrides, node)


def _refuse_overflow_contradictions(overrides: Mapping[str, str], node: tuple[ConfigLayer, ...]) -> None:
    policy, records_max, cleanup, schedule = (
        _effective_topic_setting(TOPIC_SETTINGS[name], overrides, node).value
        for name in (OVERFLOW_POLICY, OVERFLOW_RECORDS, "cleanup.policy", "penstock.schedule.enable")
    )
    assert isinstance(records_max, int)
    assert isinstance(cleanup, tuple)
    if policy == DROP_OLDEST and ("delete" not in cleanup or "compact" in cleanup):
        raise ApiError(
            ErrorCode.invalid_config,
            f"{OVERFLOW_POLICY}={DROP_OLDEST} deletes the oldest records, so it needs cleanup.policy=delete, "
            f"and the topic has cleanup.policy={','.join(cleanup)}",
        )
    if policy == DROP_OLDEST and schedule:
        raise ApiError(
            ErrorCode.invalid_config,
            f"{OVERFLOW_POLICY}={DROP_OLDEST} could delete records that are held until they are due: "
            "penstock.schedule.enable must be false",
        )
    if records_max >= 0 and "compact" in cleanup:
        raise ApiError(
            ErrorCode.invalid_config,
            f"{OVERFLOW_RECORDS} counts offsets, which compaction does not free: "
            f"cleanup.policy={','.join(cleanup)} needs it to be -1",
        )


def _effective_topic_setting(
    setting: Setting, overrides: Mapping[str, str], node: tuple[ConfigLayer, ...]
) -> EffectiveSetting:
    return effective_setting(setting, overrides, node, own=ConfigSource.TOPIC)


def _node_synonyms(
    names: tuple[NodeSynonym, ...], node: tuple[ConfigLayer, ...]
) -> Iterable[tuple[ConfigSynonym, int]]:
    for layer in node:
        for name, factor in names:
            if (text := layer.values.get(name)) is not None:
                yield ConfigSynonym(name, text, layer.source), factor


def _in_unit(value: SettingValue, factor: int) -> SettingValue:
    # -1 means unlimited in every unit.
    return value * factor if factor != 1 and isinstance(value, int) and value > 0 else value


MIN_ISR: Final = "min.insync.replicas"
FLUSH_POLICY: Final = "penstock.flush"
UNCLEAN_ELECTION: Final = "unclean.leader.election.enable"


class TopicGuarantees(NamedTuple):
    isr_min: int
    #: A replica acknowledges only what it has synced, so an unclean stop loses no acknowledged record.
    syncs_before_ack: bool
    unclean_allowed: bool


def topic_guarantees(
    overrides: Mapping[str, str], node: Iterable[ConfigLayer] = NO_LAYERS
) -> TopicGuarantees:
    layers = tuple(node)
    isr_min, flush, unclean = (
        effective_topic_setting(name, overrides, layers).value
        for name in (MIN_ISR, FLUSH_POLICY, UNCLEAN_ELECTION)
    )
    assert isinstance(isr_min, int)
    return TopicGuarantees(isr_min, flush == "ack", bool(unclean))


def effective_isr_min(isr_min: int, partition: PartitionState) -> int:
    """Caps the minimum at the number of replicas, without those that a reassignment is still adding."""
    return max(
        capped_isr_min(isr_min, len(partition.replicas), len(partition.adding_replicas)), isr_floor(partition)
    )


def isr_floor(partition: PartitionState) -> int:
    """Returns a minimum above the size of the ISR while there are eligible leader replicas.

    They may be elected because the high watermark does not advance without them. So it must not, even if this node's
    own file sets a lower min.insync.replicas than the controller's file.
    """
    return len(partition.isr) + 1 if partition.elr else 1


def capped_isr_min(isr_min: int, replicas: int, adding: int) -> int:
    return max(1, min(isr_min, replicas - adding))
