"""Producer ids are handed to brokers in blocks, so that giving one out costs no metadata record."""

from typing import Final, NamedTuple

from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import ProducerIdsRecord
from penstock.protocol.errors import ApiError, ErrorCode

PRODUCER_ID_BLOCK: Final = 1000
_PRODUCER_ID_MAX = (1 << 63) - 1


class ProducerIdBlock(NamedTuple):
    first: int
    length: int


def allocate_producer_ids(
    image: ClusterImage, *, broker_id: int, broker_epoch: int
) -> Decision[ProducerIdBlock]:
    """Raises STALE_BROKER_EPOCH for a broker that has been replaced."""
    broker = image.brokers.get(broker_id)
    if broker is None or broker.epoch != broker_epoch:
        raise ApiError(ErrorCode.stale_broker_epoch, f"Broker {broker_id} is not registered at this epoch.")
    first = image.next_producer_id
    if first > _PRODUCER_ID_MAX - PRODUCER_ID_BLOCK:
        raise ApiError(ErrorCode.unknown_server_error, "All producer ids have been used.")
    record = ProducerIdsRecord(
        broker_id=broker_id, broker_epoch=broker_epoch, next_producer_id=first + PRODUCER_ID_BLOCK
    )
    return Decision((record,), ProducerIdBlock(first, PRODUCER_ID_BLOCK))
