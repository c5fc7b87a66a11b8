"""Every message is encoded to the bytes that kio writes."""

import io
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v6.response import Coordinator
from kio.serial import entity_writer
from tests.fuzz.messages import Requests

from penstock.broker.network.apis import APIS
from penstock.protocol.schemas import MessageWriter, message_writer


def written(write: MessageWriter, message: Any) -> bytes:
    out = io.BytesIO()
    write(out, message)
    return out.getvalue()


@pytest.mark.parametrize("key", sorted(APIS))
def test_messages_of_every_version_are_kios(key: int) -> None:
    messages = Requests(seed=key)
    for version in range(APIS[key].min_version, APIS[key].max_version + 1):
        for schema in (load_request_schema(key, version), load_response_schema(key, version)):
            for _ in range(20):
                message = messages._entity(schema)
                assert written(message_writer(schema), message) == written(entity_writer(schema), message)


def test_nothing_is_written_for_what_may_not_be_null() -> None:
    coordinator = Coordinator(
        key=None,
        node_id=1,
        host="a",
        port=1,
        error_code=ErrorCode.none,
        error_message=None,
    )
    with pytest.raises(TypeError):
        written(message_writer(Coordinator), coordinator)
