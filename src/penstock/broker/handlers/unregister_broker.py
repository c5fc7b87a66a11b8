"""UnregisterBroker (key 64), v0. Removes a broker that will not return; its replicas stay assigned to it.

A live broker would register again at once, so the request is refused: stop the broker first.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.unregister_broker.v0.response import UnregisterBrokerResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.heartbeats import unregister_broker
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    controller = ctx.services.controller

    def decide(image: ClusterImage) -> Decision[None]:
        _refuse_alive(image, request.broker_id)
        return unregister_broker(image, request.broker_id, rules=controller.rules())

    await controller.propose(decide)
    return UnregisterBrokerResponse(throttle_time=timedelta(0), error_code=ErrorCode.none, error_message=None)


def _refuse_alive(image: ClusterImage, broker_id: int) -> None:
    broker = image.brokers.get(broker_id)
    if broker is not None and not broker.fenced:
        raise ApiError(ErrorCode.invalid_request, f"Broker {broker_id} is alive; stop it first.")
