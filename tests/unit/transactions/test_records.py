"""Records of `__transaction_state` have the bytes that Kafka's own classes (4.3.1) write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.stored_records import UnknownVersion
from penstock.transactions.messages import TopicPartition
from penstock.transactions.transaction import (
    NO_PRODUCER,
    STORED_STATES,
    ProducerIdAndEpoch,
    TransactionMetadata,
    TransactionState,
)
from penstock.transactions.transaction_log import (
    decode_key,
    decode_transaction,
    encode_key,
    encode_transaction,
    is_valid_transactional_id,
)

KEY = bytes.fromhex("0000" "0006" "6f7264657273")  # fmt: skip
EMPTY = TransactionMetadata(
    transactional_id="orders",
    state=TransactionState.EMPTY,
    producer=ProducerIdAndEpoch(1000, 0),
    timeout_ms=60_000,
    update_timestamp_ms=1_700_000_000_000,
)
PREPARED = TransactionMetadata(
    transactional_id="orders",
    state=TransactionState.PREPARE_COMMIT,
    producer=ProducerIdAndEpoch(1000, 32_767),
    successor=ProducerIdAndEpoch(1001, 0),
    predecessor=ProducerIdAndEpoch(1000, 32_766),
    timeout_ms=60_000,
    partitions=frozenset(
        {TopicPartition("t", 3), TopicPartition("__consumer_offsets", 7), TopicPartition("t", 0)}
    ),
    start_timestamp_ms=1_700_000_000_000,
    update_timestamp_ms=1_700_000_000_005,
    transaction_version=2,
)
EMPTY_V0 = bytes.fromhex(
    "0000" "00000000000003e8" "0000" "0000ea60" "00" "ffffffff" "0000018bcfe56800" "ffffffffffffffff"
)  # fmt: skip
EMPTY_V1 = bytes.fromhex(
    "0001" "00000000000003e8" "0000" "0000ea60" "00" "00" "0000018bcfe56800" "ffffffffffffffff" "00"
)  # fmt: skip
PREPARED_V0 = bytes.fromhex(
    "0000" "00000000000003e8" "7fff" "0000ea60" "02"
    "00000002" "0012" "5f5f636f6e73756d65725f6f666673657473" "00000001" "00000007"
    "0001" "74" "00000002" "00000000" "00000003"
    "0000018bcfe56805" "0000018bcfe56800"
)  # fmt: skip
PREPARED_V1 = bytes.fromhex(
    "0001" "00000000000003e8" "7fff" "0000ea60" "02"
    "03" "13" "5f5f636f6e73756d65725f6f666673657473" "02" "00000007" "00"
    "02" "74" "03" "00000000" "00000003" "00"
    "0000018bcfe56805" "0000018bcfe56800"
    "04" "00" "08" "00000000000003e8" "01" "08" "00000000000003e9" "02" "02" "0002" "03" "02" "0000"
)  # fmt: skip
PRODUCERS = st.builds(ProducerIdAndEpoch, st.integers(0, 2**63 - 1), st.integers(0, 32_767))
#: Beside Kafka's four tagged fields: whose question was answered, which it forgets with the coordinator.
PREDECESSOR_EPOCH = bytes.fromhex("e807" "02" "7ffe")  # fmt: skip


def test_a_key_is_kafkas() -> None:
    assert encode_key("orders") == KEY
    assert decode_key(KEY) == "orders"
    assert decode_key(b"\x00\x01" + KEY[2:]) is None


def test_a_transactional_id_at_rest_is_kafkas() -> None:
    assert encode_transaction(EMPTY) == (KEY, EMPTY_V1)
    assert decode_transaction("orders", EMPTY_V1) == EMPTY
    assert decode_transaction("orders", EMPTY_V0) == EMPTY


def test_a_prepared_transaction_is_kafkas_with_one_more_tagged_field() -> None:
    ours = PREPARED_V1.replace(bytes.fromhex("0400" "08"), bytes.fromhex("0500" "08"))  # fmt: skip
    assert encode_transaction(PREPARED) == (KEY, ours + PREDECESSOR_EPOCH)
    assert decode_transaction("orders", ours + PREDECESSOR_EPOCH) == PREPARED


def test_what_kafka_stored_is_read() -> None:
    assert decode_transaction("orders", PREPARED_V1) == PREPARED._replace(
        predecessor=ProducerIdAndEpoch(1000)
    )
    older = PREPARED._replace(successor=None, predecessor=NO_PRODUCER, transaction_version=0)
    assert decode_transaction("orders", PREPARED_V0) == older


def test_a_layout_that_is_not_known_is_not_guessed_at() -> None:
    newer_tag = EMPTY_V1[:-1] + bytes.fromhex("01" "ff07" "03" "010203")  # fmt: skip
    for value in (b"\x00\x02" + EMPTY_V1[2:], newer_tag):
        with pytest.raises(UnknownVersion):
            decode_transaction("orders", value)


def test_an_id_must_fit_into_its_key() -> None:
    assert is_valid_transactional_id("x" * 32_767)
    assert not is_valid_transactional_id("x" * 32_768)
    assert not is_valid_transactional_id("é" * 16_384)
    assert not is_valid_transactional_id("")


@given(
    state=st.sampled_from(STORED_STATES),
    producers=st.tuples(PRODUCERS, st.none() | PRODUCERS, PRODUCERS),
    partitions=st.frozensets(
        st.builds(TopicPartition, st.text("aé.", min_size=1, max_size=249), st.integers(0, 2**31 - 1)),
        max_size=300,
    ),
    version=st.integers(0, 2),
)
def test_whatever_is_stored_is_read_as_it_was(
    state: TransactionState,
    producers: tuple[ProducerIdAndEpoch, ProducerIdAndEpoch | None, ProducerIdAndEpoch],
    partitions: frozenset[TopicPartition],
    version: int,
) -> None:
    producer, successor, predecessor = producers
    stored = EMPTY._replace(
        state=state,
        producer=producer,
        successor=successor,
        predecessor=predecessor,
        partitions=frozenset() if state is TransactionState.EMPTY else partitions,
        transaction_version=version,
    )
    key, value = encode_transaction(stored)
    assert value is not None
    assert decode_transaction(decode_key(key) or "", value) == stored
