"""How many elements the arrays of a request may have: for each API, wherever its elements are."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import pytest
from benchmarks.request_turns import arrays, message
from kio.index import load_request_schema
from kio.serial import entity_writer

from penstock.broker.network.apis import APIS, FETCH, PRODUCE, SHARE_ACKNOWLEDGE, SHARE_FETCH
from penstock.protocol.bounds import TooManyElements, classify_type
from penstock.protocol.schemas import stepwise_request_decoder

#: Packed by hand: Produce has a bound of its own, and Fetch is served in slices. For those of share groups, see
#: test_share.py.
BY_HAND = {PRODUCE, FETCH, SHARE_FETCH, SHARE_ACKNOWLEDGE}
ELEMENTS_MAX = 300
CASES = [
    pytest.param(api.key, version, path, id=f"{api.name}-v{version}-{'.'.join(path)}")
    for api in APIS.values()
    if api.key not in BY_HAND
    for version in {api.min_version, api.max_version}
    for path in arrays(load_request_schema(api.key, version))
]


def decode(api_key: int, version: int, path: tuple[str, ...], count: int) -> Any:
    out = io.BytesIO()
    schema = load_request_schema(api_key, version)
    entity_writer(schema)(out, message(schema, path, count))
    steps = stepwise_request_decoder(api_key, version)(memoryview(out.getvalue()), 0, ELEMENTS_MAX)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def arrays_on(entity: Any, path: tuple[str, ...]) -> int:
    """How many parts of the path are arrays: the others are messages in messages."""
    (here,) = (field for field in fields(entity) if field.name == path[0])
    is_array, element, _ = classify_type(here.type)
    return is_array + (arrays_on(element, path[1:]) if path[1:] else 0)


@pytest.mark.parametrize(("api_key", "version", "path"), CASES)
def test_each_array_counts(api_key: int, version: int, path: tuple[str, ...]) -> None:
    # The arrays around it have an element each.
    others = arrays_on(load_request_schema(api_key, version), path) - 1
    decode(api_key, version, path, ELEMENTS_MAX - others)
    with pytest.raises(TooManyElements):
        decode(api_key, version, path, ELEMENTS_MAX - others + 1)


def test_all_arrays_count_together() -> None:
    """So that many small arrays allow no more than one that is large."""
    out = io.BytesIO()
    schema = load_request_schema(2, 7)
    topic = message(schema, ("topics", "partitions"), 100).topics[0]
    request = message(schema, ("topics",), 1)
    for topics, is_refused in ((2, False), (3, True)):
        out = io.BytesIO()
        values = {name: getattr(request, name) for name in ("replica_id", "isolation_level")}
        entity_writer(schema)(out, schema(**values, topics=(topic,) * topics))
        steps = stepwise_request_decoder(2, 7)(memoryview(out.getvalue()), 0, ELEMENTS_MAX)
        if is_refused:
            with pytest.raises(TooManyElements):
                list(steps)
        else:
            list(steps)
