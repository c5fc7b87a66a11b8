"""Errors keep all of their fields between processes."""

import pickle

import pytest

from penstock.client.errors import (
    ClientError,
    Fenced,
    OutOfRange,
    Refused,
    Unavailable,
    broker_error,
    parse_error_code,
    raise_for_error,
)
from penstock.protocol.errors import ErrorCode


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("nobody answered"),
        broker_error(ErrorCode.message_too_large, "orders[1]", "2 MB"),
        broker_error(ErrorCode.producer_fenced, "tx"),
        OutOfRange("orders", 3, 5, 10, 20),
    ],
)
def test_errors_survive_pickling(error: ClientError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_fencing_has_a_kind_of_its_own() -> None:
    assert isinstance(broker_error(ErrorCode.invalid_producer_epoch, "tx"), Fenced)
    assert not isinstance(broker_error(ErrorCode.invalid_txn_state, "tx"), Fenced)


def test_check_lets_the_good_pass() -> None:
    raise_for_error(ErrorCode.none, "orders")
    with pytest.raises(Refused, match=r"orders: message too large \(2 MB\)"):
        raise_for_error(ErrorCode.message_too_large, "orders", "2 MB")


def test_an_error_that_is_newer_than_we_are() -> None:
    assert parse_error_code(31_999) is ErrorCode.unknown_server_error
    assert parse_error_code(6) is ErrorCode.not_leader_or_follower


def test_an_offset_out_of_range_says_where_the_log_is() -> None:
    assert str(OutOfRange("orders", 3, 5, 10, 20)) == (
        "offset 5 of orders[3] was deleted: the log goes from 10 to 20"
    )
