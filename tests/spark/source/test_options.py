"""Options of the source: the names of Spark's Kafka connector in any case, and errors that name the option."""

import pytest

from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import EARLIEST, LATEST
from penstock.spark.option_reader import OptionError
from penstock.spark.sink.options import Contract
from penstock.spark.source.options import AtEdge, AtOffsets, AtTime, SourceOptions, Subscription

GIVEN = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "orders"}


def parse(streaming: bool = False, **more: str) -> SourceOptions:
    return SourceOptions.parse(GIVEN | more, streaming=streaming)


def refusal(streaming: bool = False, **more: str) -> str:
    with pytest.raises(OptionError) as raised:
        parse(streaming, **more)
    return str(raised.value)


def test_default_bounds_of_batches_and_streams():
    assert (parse().start, parse().end) == (AtEdge(EARLIEST), AtEdge(LATEST))
    assert parse(streaming=True).start == AtEdge(LATEST)
    assert parse().fail_on_data_loss
    assert parse().isolation is IsolationLevel.READ_COMMITTED


def test_names_are_case_insensitive():
    options = parse(STARTINGOFFSETS="Earliest", failondataloss="False", includeHeaders="true")
    assert options.start == AtEdge(EARLIEST)
    assert (options.fail_on_data_loss, options.include_headers) == (False, True)


def test_connection_settings_and_group():
    options = parse(
        **{"kafka.group.id": "g", "kafka.isolation.level": "read_committed", "kafka.client.id": "me"}
    )
    assert options.group_id == "g"
    assert options.isolation is IsolationLevel.READ_COMMITTED
    assert options.connection.client_id == "me"
    assert options.connection.unknown == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"subscribe": "b, a,,b"}, Subscription(names=("a", "b"))),
        ({"subscribePattern": "a.*"}, Subscription(pattern="a.*")),
        ({"assign": '{"a": [1, 0], "b": [2]}'}, Subscription(assigned=(("a", 0), ("a", 1), ("b", 2)))),
    ],
)
def test_subscriptions(given, wanted):
    options = SourceOptions.parse({"kafka.bootstrap.servers": "h:1"} | given, streaming=True)
    assert options.subscription == wanted


def test_offsets_by_partition():
    text = '{"orders": {"0": 23, "1": -2}}'
    assert parse(startingOffsets=text).start == AtOffsets({("orders", 0): 23, ("orders", 1): EARLIEST})
    assert parse(endingOffsets='{"orders": {"0": -1}}').end == AtOffsets({("orders", 0): LATEST})


def test_a_timestamp_overrides_timestamps_by_partition_which_override_offsets():
    each = '{"orders": {"0": 5}}'
    both = parse(startingOffsetsByTimestamp=each, startingOffsets="earliest").start
    assert both == AtTime({("orders", 0): 5}, "startingOffsetsByTimestamp", or_latest=False)
    everything = parse(
        startingTimestamp="7", startingOffsetsByTimestamp=each, startingOffsetsByTimestampStrategy="latest"
    )
    assert everything.start == AtTime(7, "startingTimestamp", or_latest=True)
    assert parse(endingTimestamp="9").end == AtTime(9, "endingTimestamp", or_latest=True)


def test_limits():
    options = parse(
        minPartitions="3", maxRecordsPerPartition="10", maxOffsetsPerTrigger="9", minOffsetsPerTrigger="4"
    )
    assert (options.partitions_min, options.partition_records_max) == (3, 10)
    assert (options.trigger_offsets_max, options.trigger_offsets_min) == (9, 4)


@pytest.mark.parametrize(
    ("text", "ms"), [("15m", 900_000), ("500ms", 500), ("2 s", 2_000), ("1h", 3_600_000), ("70", 70)]
)
def test_durations(text, ms):
    assert parse(maxTriggerDelay=text).trigger_delay_ms_max == ms


def test_fetch_options_have_no_effect():
    assert parse(**{"fetchOffset.numRetries": "3", "groupIdPrefix": "x"}) == parse()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"startingOffset": "latest"}, "did you mean startingOffsets?"),
        ({"subscribePattern": "a.*"}, "exactly one of the options"),
        ({"startingOffsets": "latest"}, "startingOffsets=latest"),
        ({"startingOffsets": '{"orders": {"0": -1}}'}, "startingOffsets=latest"),
        ({"endingOffsets": "earliest"}, "endingOffsets=earliest"),
        ({"endingOffsets": "soon"}, "endingOffsets=soon"),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, "startingOffsets=-3"),
        ({"startingOffsets": '{"orders": {"x": 1}}'}, "startingOffsets=x"),
        ({"startingOffsets": '{"orders": 1}'}, "startingOffsets"),
        ({"startingOffsets": '{"orders": '}, "is not valid JSON"),
        ({"minPartitions": "0"}, "minPartitions=0"),
        ({"failOnDataLoss": "yes"}, "failOnDataLoss=yes"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay=soon"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "minOffsetsPerTrigger=5"),
        ({"kafka.isolation.level": "high"}, "kafka.isolation.level=high"),
        ({"kafka.auto.offset.reset": "latest"}, "use startingOffsets"),
        ({"kafka.security.protocol": "MAGIC"}, "kafka.security.protocol=MAGIC"),
        ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "startingOffsetsByTimestampStrategy=guess"),
    ],
)
def test_errors_name_the_option(given, words):
    assert words in refusal(**given)


def test_an_invalid_pattern_is_refused():
    given = {"kafka.bootstrap.servers": "h:1", "subscribePattern": "a("}
    with pytest.raises(OptionError, match="subscribePattern"):
        SourceOptions.parse(given, streaming=True)


def test_a_stream_has_no_end():
    assert "endingOffsets" in refusal(streaming=True, endingOffsets="latest")


def test_topics_that_are_read_when_due():
    options = parse(streaming=True, subscribe="orders, retry", readWhenDue=" retry,")
    assert options.due_topics == ("retry",)
    assert parse(streaming=True).due_topics == ()
    assert "readWhenDue=paid: paid is not among the topics that are read" in refusal(True, readWhenDue="paid")
    assert "option readWhenDue is for streams" in refusal(readWhenDue="orders")


@pytest.mark.parametrize(
    ("text", "wanted"), [("exactly-once", Contract.EXACTLY_ONCE), (None, Contract.AT_LEAST_ONCE)]
)
def test_contracts(text, wanted):
    assert parse(streaming=True, **({"contract": text} if text else {})).contract is wanted
    group = {"kafka.group.id": "g"}
    assert parse(streaming=True, contract="At-Most-Once", **group).contract is Contract.AT_MOST_ONCE


def test_contracts_that_are_refused():
    assert "option contract=often: must be one of" in refusal(True, contract="often")
    assert "option contract=at-most-once: needs kafka.group.id" in refusal(True, contract="at-most-once")
    assert "is for streams" in refusal(contract="at-most-once", **{"kafka.group.id": "g"})
