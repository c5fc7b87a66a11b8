"""A node stops when another process registers with the same node id."""

from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import create_topic, running

from penstock.broker import node as node_module
from penstock.cluster.metadata_records import RegisterBrokerRecord


async def test_a_node_whose_id_was_given_to_another_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(BaseException):
        pass

    def end(error: Exception, what: str) -> None:
        raise Ended(what)

    monkeypatch.setattr(node_module, "end_process", end)
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        own = node.image.brokers[node.node_id]
        image = node.image.fork()
        record = RegisterBrokerRecord(
            broker_id=node.node_id, incarnation_id=own.incarnation, broker_epoch=own.epoch + 50, end_points=()
        )
        delta = image.apply([record])
        await node._follow(delta, image)  # the same process, registered again
        image = node.image.fork()
        delta = image.apply(
            [
                RegisterBrokerRecord(
                    broker_id=node.node_id,
                    incarnation_id=UUID(int=7),
                    broker_epoch=own.epoch + 60,
                    end_points=(),
                )
            ]
        )
        with pytest.raises(Ended, match="another process"):
            await node._follow(delta, image)
