"""The options of the sink, with the names of Spark's own Kafka connector. Pure: it connects to no broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.compression import Codec
from penstock.spark.exactly_once.decisions import QUERY_SEPARATOR, MicroBatch
from penstock.spark.option_reader import OptionError, OptionReader, invalid_option

#: Options that Spark itself passes to every sink.
_SPARK_OPTIONS: Final = ("checkpointLocation", "outputMode", "path", "queryName")
#: Options of the source. Programs often pass the same options to source and sink.
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
#: Producer settings that would conflict with how the sink works.
_REFUSED_SETTINGS: Final = {
    "key.serializer": "keys are binary or string; convert them with Spark functions",
    "value.serializer": "values are binary or string; convert them with Spark functions",
    "transactional.id": "the sink derives it from the checkpoint; set contract=exactly-once",
}
#: With fewer acknowledgements, records could be lost.
_ACKS: Final = {"all": "all", "-1": "all"}
_CODECS: Final = {each.name.lower(): each for each in Codec}
#: The default of max.message.bytes.
_BATCH_BYTES_MAX: Final = 1 << 20
#: The default of transaction.max.timeout.ms.
_TIMEOUT_MS: Final = 900_000
_INT32_MAX: Final = (1 << 31) - 1


class Contract(Enum):
    """How often a row is delivered if something fails."""

    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"
    EXACTLY_ONCE = "exactly-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    connection: ConnectionSettings
    #: The topic of all rows. None: each row has a column `topic`.
    topic: str | None = None
    #: The column with the timestamps of records. None: the time of writing.
    timestamp_column: str | None = None
    #: The id of a batch write that may be retried and is done once. None: the write has no id.
    idempotent_write: MicroBatch | None = None
    contract: Contract = Contract.AT_LEAST_ONCE
    codec: Codec = Codec.NONE
    batch_bytes_max: int = _BATCH_BYTES_MAX
    #: Use two-phase commit if brokers support it: transactions stay open until the driver ends them.
    two_phase: bool = True
    #: The timeout of transactions without two-phase commit.
    transaction_timeout_ms: int = _TIMEOUT_MS
    #: The location of the checkpoint, if it is known.
    checkpoint: str | None = None
    #: Fail if a transaction was aborted after it was decided to commit it.
    fail_on_data_loss: bool = True
    #: Check and encode all rows, but send nothing.
    dry_run: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Parse the options. Raises OptionError, which names the option."""
        given = OptionReader(options)
        idempotent_write = _parse_idempotent_write(given, streaming=streaming)
        given.choice("kafka.acks", _ACKS, "all")
        if not given.flag("kafka.enable.idempotence", default=True):
            raise invalid_option(
                "kafka.enable.idempotence", "false", "must be true: retries would write duplicates"
            )
        dry_run = given.flag("dryRun", default=False)
        contract = _contract(given, idempotent_write)
        bytes_max = given.number("kafka.max.request.size", at_most=_INT32_MAX)
        timeout_ms = given.number("kafka.transaction.timeout.ms", at_most=_INT32_MAX)
        parsed = cls(
            topic=given.text("topic") or None,
            timestamp_column=given.text("timestampColumn") or None,
            # A dry run writes nothing, so it needs no transactions and no claims.
            idempotent_write=None if dry_run else idempotent_write,
            checkpoint=given.text("checkpointLocation") or None,
            contract=Contract.AT_LEAST_ONCE if dry_run else contract,
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            dry_run=dry_run,
            codec=given.choice("kafka.compression.type", _CODECS, Codec.NONE),
            batch_bytes_max=_BATCH_BYTES_MAX if bytes_max is None else bytes_max,
            # If the driver dies, nothing would end the open transactions of a batch write without an id.
            two_phase=given.flag(
                "kafka.transaction.two.phase.commit.enable",
                default=streaming or idempotent_write is not None,
            ),
            transaction_timeout_ms=_TIMEOUT_MS if timeout_ms is None else timeout_ms,
            connection=given.connection(_REFUSED_SETTINGS),
        )
        for name in (*_SPARK_OPTIONS, *_IGNORED_OPTIONS):
            given.text(name)
        given.refuse_unknown(SINK_OPTIONS)
        return parsed


CONTRACTS: Final = {each.value: each for each in Contract}


def _contract(given: OptionReader, idempotent_write: MicroBatch | None) -> Contract:
    if idempotent_write is None:
        return given.choice("contract", CONTRACTS, Contract.AT_LEAST_ONCE)
    asked = given.choice("contract", CONTRACTS, Contract.EXACTLY_ONCE)
    if asked is not Contract.EXACTLY_ONCE:
        raise invalid_option("contract", asked.value, "must be exactly-once with txnAppId and txnVersion")
    return asked


def _parse_idempotent_write(given: OptionReader, *, streaming: bool) -> MicroBatch | None:
    app, version = given.text("txnAppId") or None, given.number("txnVersion", at_least=0)
    if app is None and version is None:
        return None
    if streaming:
        raise OptionError(
            "options txnAppId and txnVersion are for batch writes: a stream uses its checkpoint"
        )
    if app is None or version is None:
        raise OptionError("options txnAppId and txnVersion must be given together")
    if QUERY_SEPARATOR in app:
        raise invalid_option("txnAppId", app, f"must not contain {QUERY_SEPARATOR}")
    return MicroBatch(app, version)
