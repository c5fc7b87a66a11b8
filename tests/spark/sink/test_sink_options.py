"""Options of the sink: the names of Spark's Kafka connector, and errors that name the option."""

import pickle

import pytest

from penstock.protocol.compression import Codec
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.option_reader import OptionError
from penstock.spark.sink.options import Contract, SinkOptions
from penstock.spark.sink.writers import checkpoint_name

SERVERS = {"kafka.bootstrap.servers": "localhost:9092"}


def parse(streaming: bool = True, **options: str) -> SinkOptions:
    return SinkOptions.parse({**SERVERS, **options}, streaming=streaming)


def test_defaults():
    options = parse()
    assert options.contract is Contract.AT_LEAST_ONCE
    assert (options.topic, options.codec, options.fail_on_data_loss) == (None, Codec.NONE, True)
    assert options.two_phase
    assert not parse(streaming=False).two_phase, (
        "nothing would end the open transactions of a dead batch write"
    )


def test_all_options():
    given = {
        "TOPIC": "t",
        "contract": "Exactly-Once",
        "kafka.compression.type": "zstd",
        "kafka.max.request.size": "5000",
        "kafka.transaction.timeout.ms": "7000",
        "kafka.transaction.two.phase.commit.enable": "true",
        "failOnDataLoss": "false",
        "kafka.acks": "all",
        "kafka.client.id": "me",
        "checkpointLocation": "/somewhere",
        "queryName": "q",
    }
    options = parse(streaming=False, **given)
    assert options.topic == "t"
    assert options.contract is Contract.EXACTLY_ONCE
    assert (options.codec, options.batch_bytes_max) == (Codec.ZSTD, 5000)
    assert (options.two_phase, options.transaction_timeout_ms) == (True, 7000)
    assert not options.fail_on_data_loss
    assert options.connection.client_id == "me"
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_dry_run_has_no_contract():
    options = parse(streaming=False, txnAppId="app", txnVersion="7", dryRun="true")
    assert (options.dry_run, options.idempotent_write, options.contract) == (
        True,
        None,
        Contract.AT_LEAST_ONCE,
    )
    assert not parse().dry_run


def test_a_batch_write_with_an_id_is_done_once():
    options = parse(streaming=False, txnAppId="app", txnVersion="7")
    assert options.idempotent_write == MicroBatch("app", 7)
    assert options.contract is Contract.EXACTLY_ONCE
    assert options.two_phase, "the write is retried, and then its open transactions are ended"
    assert parse(streaming=False).idempotent_write is None
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_checkpoint_has_one_name():
    here = checkpoint_name("/some/where/")
    assert here == checkpoint_name("file:///some/where") == checkpoint_name("/some/../some/where")
    assert here.endswith(":/some/where")
    assert here != "/some/where", "the same path on another host is another folder"
    assert checkpoint_name("s3a://some/where/") == "s3a://some/where"
    assert checkpoint_name(None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"txnAppId": "a"}, "options txnAppId and txnVersion must be given together"),
        ({"txnVersion": "1"}, "must be given together"),
        ({"txnAppId": "a", "txnVersion": "x"}, "option txnVersion=x: must be a whole number of at least 0"),
        ({"txnAppId": "a/b", "txnVersion": "1"}, "option txnAppId=a/b: must not contain /"),
        (
            {"txnAppId": "a", "txnVersion": "1", "contract": "at-least-once"},
            "option contract=at-least-once: must be exactly-once with txnAppId and txnVersion",
        ),
        (
            {"txnAppId": "a", "txnVersion": "1", "streaming": True},
            "txnAppId and txnVersion are for batch writes",
        ),
    ],
)
def test_invalid_write_ids(options, words):
    with pytest.raises(OptionError) as raised:
        parse(**{"streaming": False} | options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contract": "twice"}, "option contract=twice: must be one of at-most-once, at-least-once, exactly"),
        ({"topics": "t"}, "there is no option topics; did you mean topic?"),
        ({"kafka.acks": "1"}, "option kafka.acks=1: must be one of all, -1"),
        ({"kafka.enable.idempotence": "false"}, "option kafka.enable.idempotence=false"),
        ({"kafka.compression.type": "rar"}, "option kafka.compression.type=rar: must be one of none, gzip"),
        ({"kafka.transaction.timeout.ms": "soon"}, "option kafka.transaction.timeout.ms=soon"),
        ({"kafka.transactional.id": "x"}, "option kafka.transactional.id cannot be set"),
        ({"kafka.value.serializer": "x"}, "option kafka.value.serializer cannot be set"),
        ({"kafka.request.timeout.ms": "soon"}, "option kafka.request.timeout.ms"),
    ],
)
def test_invalid_values(options, words):
    with pytest.raises(OptionError) as raised:
        parse(**options)
    assert words in str(raised.value)
