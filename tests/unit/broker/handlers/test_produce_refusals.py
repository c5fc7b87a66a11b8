"""A producer with several batches in flight keeps its sequence when the first of them is refused."""

from datetime import timedelta
from pathlib import Path

from kio.schema.produce.v12 import request as schema
from tests.unit.broker.partition.one_broker import ME, OTHER, PEER, Broker, Pending, broker_of_three
from tests.unit.broker.raw_client import until

from penstock.broker.handlers import produce
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch


def send(broker: Broker, sequence: int) -> Pending:
    batch = encode_batch([Record(0, 1, None, b"x")], producer_id=7, producer_epoch=0, base_sequence=sequence)
    part = schema.PartitionProduceData(index=0, records=bytes(batch))
    topic = schema.TopicProduceData(name="t", partition_data=(part,))
    request = schema.ProduceRequest(acks=-1, timeout=timedelta(seconds=60), topic_data=(topic,))
    return broker.send(produce, request)


async def test_what_follows_a_refused_batch_is_refused_alike(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(isr=(ME, PEER), min_isr=2)
        send(broker, 0)
        await broker.change(isr=(ME,))
        assert send(broker, 1).produced.error_code is ErrorCode.not_enough_replicas
        await broker.change(isr=(ME, PEER))
        assert send(broker, 2).produced.error_code is ErrorCode.not_enough_replicas
        again = [send(broker, sequence) for sequence in (1, 2)]
        broker.fetch({0: 3}, replica=PEER)
        assert [(await write.done()).produced.base_offset for write in again] == [1, 2]


async def test_so_is_what_follows_one_that_came_before_this_node_led(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(isr=(ME, PEER))
        send(broker, 0)
        await broker.change(leader=OTHER, isr=(OTHER, ME))
        assert send(broker, 1).produced.error_code is ErrorCode.not_leader_or_follower
        await broker.change(leader=ME)
        assert send(broker, 2).produced.error_code is ErrorCode.not_leader_or_follower
        assert not send(broker, 1).is_done


async def test_so_is_what_follows_one_that_was_looked_into_while_the_lead_was_lost(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(isr=(ME, PEER), configs={"compression.type": "gzip"})
        await until(lambda: not broker.partition().last_turn)
        first = send(broker, 0)
        await until(lambda: broker.partition().log.end_offset == 1)
        refused = send(broker, 1)  # in a thread by now
        await broker.change(leader=OTHER, isr=(OTHER, ME))
        assert (await refused.done()).produced.error_code is ErrorCode.not_leader_or_follower
        assert first.is_done
        await broker.change(leader=ME)
        assert (await send(broker, 2).done()).produced.error_code is ErrorCode.not_leader_or_follower
