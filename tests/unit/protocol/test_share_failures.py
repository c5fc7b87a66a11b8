"""ShareFailures on the wire: reports arrive complete, and malformed requests are refused."""

import contextlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.share_failures import (
    DELAY_MS_MAX,
    ShareFailures,
    WorkerError,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures,
)

_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
_failure = st.builds(
    WorkerFailure,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(-1, DELAY_MS_MAX),
    st.none() | st.builds(WorkerError, _text, _text, _text),
)
_asked = st.builds(
    ShareFailures, _text, st.uuids(), st.integers(0, 2**31 - 1), st.lists(_failure, max_size=4), st.booleans()
)


@given(_asked)
def test_it_arrives_as_it_was_sent(asked: ShareFailures) -> None:
    assert parse_share_failures(memoryview(b"head" + encode_share_failures(asked)), 4) == asked


@given(_asked, st.data())
def test_what_is_cut_short_is_refused(asked: ShareFailures, data: st.DataObject) -> None:
    whole = encode_share_failures(asked)
    size = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MalformedFrame):
        parse_share_failures(memoryview(whole[:size]))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    with contextlib.suppress(MalformedFrame):
        parse_share_failures(memoryview(noise))


@pytest.mark.parametrize("delay_ms", [DELAY_MS_MAX + 1, 2**63 - 1, -2])
def test_a_delay_out_of_range_is_refused(delay_ms: int) -> None:
    asked = ShareFailures("g", UUID(int=1), 0, [WorkerFailure(1, 1, delay_ms)])
    with pytest.raises(MalformedFrame):
        parse_share_failures(memoryview(encode_share_failures(asked)))


def test_long_texts_are_cut() -> None:
    error = WorkerError("É" * 5_000, "m" * 50_000, "s" * 50_000)
    asked = ShareFailures("g", UUID(int=1), 0, [WorkerFailure(1, 1, error=error)])
    (failure,) = parse_share_failures(memoryview(encode_share_failures(asked))).failures
    assert failure.error is not None
    assert [len(text.encode()) for text in failure.error] == [512, 4_096, 8_192]
