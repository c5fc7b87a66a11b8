"""The options of the sink, by the names of Spark's own Kafka connector. Pure: nothing here talks to a broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from penstock.client.errors import ClientError
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.compression import Codec
from penstock.spark.exactly_once.decisions import QUERY_SEPARATOR, MicroBatch
from penstock.spark.option_reader import CONNECTION_PREFIX, OptionError, OptionReader, invalid_option

#: Those that Spark itself hands on to every sink.
_SPARK_OPTIONS: Final = ("checkpointLocation", "outputMode", "path", "queryName")
#: Of the connector, about reading; who writes what it has read often gives both the same options.
_IGNORED_OPTIONS: Final = ("includeHeaders",)
SINK_OPTIONS: Final = (
    *_IGNORED_OPTIONS,
    "contract",
    "dryRun",
    "failOnDataLoss",
    "kafka.bootstrap.servers",
    "kafka.compression.type",
    "kafka.max.request.size",
    "kafka.transaction.timeout.ms",
    "kafka.transaction.two.phase.commit.enable",
    "timestampColumn",
    "topic",
    "txnAppId",
    "txnVersion",
)
#: Settings of producers that would contradict what the sink itself decides.
_REFUSED_SETTINGS: Final = {
    "key.serializer": "keys are binary or string; convert them with functions of Spark",
    "value.serializer": "values are binary or string; convert them with functions of Spark",
    "transactional.id": "a query writes under the id of its checkpoint; set contract=exactly-once",
}
_ACKS: Final = ("all", "-1")
_CODECS: Final = {each.name.lower(): each for each in Codec}
_FLAGS: Final = {"true": True, "false": False}
#: As much as a topic takes at once unless it is told otherwise.
_BATCH_BYTES_MAX: Final = 1 << 20
#: What Apache Kafka and Penstock allow at most unless told otherwise.
_TIMEOUT_MS: Final = 900_000


class Contract(Enum):
    """How often a row is written, whatever fails."""

    #: Attempts at a task that are not the first write nothing; a source with this contract gives nothing twice.
    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    connection: ConnectionSettings
    #: Where all rows go; None where a column says that.
    topic: str | None = None
    #: Which column holds the time of each record; None where all are of now.
    timestamp_column: str | None = None
    #: Of a batch write that is to be done once, however often it is repeated; None where it has no name.
    idempotent_write: MicroBatch | None = None
    contract: Contract = Contract.AT_LEAST_ONCE
    codec: Codec = Codec.NONE
    batch_bytes_max: int = _BATCH_BYTES_MAX
    #: Ask for transactions that stay open until the driver ends them, where brokers allow that.
    two_phase: bool = True
    #: How long they stay open else.
    transaction_timeout_ms: int = _TIMEOUT_MS
    #: Where the query keeps how far it has come, if that is known.
    checkpoint: str | None = None
    #: Stop when what was decided to be written has been aborted meanwhile.
    fail_on_data_loss: bool = True
    #: Look at all rows as a write does, and send none of them.
    dry_run: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Raises OptionError, which names the option."""
        given = OptionReader(options)
        settings = given.connection()
        idempotent_write = _parse_idempotent_write(given, streaming=streaming)
        parsed = cls(
            topic=given.text("topic") or None,
            timestamp_column=given.text("timestampColumn") or None,
            idempotent_write=idempotent_write,
            checkpoint=given.text("checkpointLocation") or None,
            contract=_contract(given, idempotent_write),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            dry_run=given.flag("dryRun", default=False),
            codec=_codec(settings.pop("compression.type", "none")),
            batch_bytes_max=_number(settings, "max.request.size", _BATCH_BYTES_MAX),
            # Nobody would end what the driver of a batch write that is not repeated leaves behind when it dies.
            two_phase=_flag(
                settings,
                "transaction.two.phase.commit.enable",
                default=streaming or idempotent_write is not None,
            ),
            transaction_timeout_ms=_number(settings, "transaction.timeout.ms", _TIMEOUT_MS),
            connection=_connection(settings),
        )
        for name in (*_SPARK_OPTIONS, *_IGNORED_OPTIONS):
            given.text(name)
        given.refuse_unknown(SINK_OPTIONS)
        return parsed._as_dry_run() if parsed.dry_run else parsed

    def _as_dry_run(self) -> SinkOptions:
        """Where nothing is written there is nothing to keep count of."""
        return replace(self, contract=Contract.AT_LEAST_ONCE, idempotent_write=None)


def parse_contract(text: str | None) -> Contract | None:
    """None where nothing is said. Raises OptionError."""
    names = [each.value for each in Contract]
    if text is None:
        return None
    if text.lower() not in names:
        raise invalid_option("contract", text, f"must be one of {', '.join(names)}")
    return Contract(text.lower())


def _contract(given: OptionReader, idempotent_write: MicroBatch | None) -> Contract:
    asked = parse_contract(given.text("contract"))
    if idempotent_write is None:
        return asked or Contract.AT_LEAST_ONCE
    if asked not in (None, Contract.EXACTLY_ONCE):
        raise invalid_option(
            "contract", asked.value, "must be exactly-once where txnAppId and txnVersion are given"
        )
    return Contract.EXACTLY_ONCE


def _parse_idempotent_write(given: OptionReader, *, streaming: bool) -> MicroBatch | None:
    app, version = given.text("txnAppId") or None, given.number("txnVersion", at_least=0)
    if app is None and version is None:
        return None
    if streaming:
        raise OptionError(
            "options txnAppId and txnVersion are for batch writes: a stream goes by its checkpoint"
        )
    if app is None or version is None:
        raise OptionError("options txnAppId and txnVersion name a write together: both are needed")
    if QUERY_SEPARATOR in app:
        raise invalid_option("txnAppId", app, f"must not have {QUERY_SEPARATOR} in it")
    return MicroBatch(app, version)


def _codec(text: str) -> Codec:
    name = text.strip().lower()
    if name not in _CODECS:
        raise invalid_option("kafka.compression.type", text, f"must be one of {', '.join(_CODECS)}")
    return _CODECS[name]


def _number(settings: dict[str, str], name: str, default: int) -> int:
    text = settings.pop(name, str(default)).strip()
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise invalid_option(CONNECTION_PREFIX + name, text, "must be a whole number of at least 1")
    return int(text)


def _flag(settings: dict[str, str], name: str, *, default: bool) -> bool:
    text = settings.pop(name, str(default)).strip().lower()
    if text not in _FLAGS:
        raise invalid_option(CONNECTION_PREFIX + name, text, "must be true or false")
    return _FLAGS[text]


def _connection(settings: dict[str, str]) -> ConnectionSettings:
    for name, advice in _REFUSED_SETTINGS.items():
        if name in settings:
            raise OptionError(f"option {CONNECTION_PREFIX}{name} cannot be set: {advice}")
    acks = settings.pop("acks", _ACKS[0]).strip().lower()
    if acks not in _ACKS:
        raise invalid_option(
            "kafka.acks", acks, "must be all: what fewer replicas have could be lost, and be missed"
        )
    if not _flag(settings, "enable.idempotence", default=True):
        raise invalid_option(
            "kafka.enable.idempotence", "false", "must be true: nothing is gained by writing twice"
        )
    try:
        return ConnectionSettings.parse({"client.id": "penstock-spark", **settings})
    except ClientError as refused:
        raise OptionError(f"option {CONNECTION_PREFIX}{refused}") from None
