"""The five share group state APIs (keys 83 to 87): conversion between their messages and the values that the share
state rules use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from penstock.groups.share.state import share_state
from penstock.protocol.schemas import schema_class

_NO_STATE: Final = share_state.ShareState(0, 0)
_NO_SUMMARY: Final = share_state.ShareStateSummary(0, 0, 0, 0)


class StateApi(NamedTuple):
    """How to encode and decode the requests and replies of one API, in messages of the newest version."""

    api_key: int
    name: str  # "Write" of WriteShareGroupState and WriteStateData
    folder: str
    request: type
    encode_part: Callable[[Any], dict[str, Any]]  # the fields of a request
    decode_part: Callable[[share_state.SharePartitionKey, Any], share_state.ShareStateRequest]
    encode_result: Callable[[share_state.ShareStateReply], dict[str, Any]]  # the fields of a reply
    decode_result: Callable[[Any], share_state.ShareStateReply]
    suffix: str = ""
    numbers: Callable[[Any], tuple[int, ...]] = lambda one: (one.key.partition,)

    def message(self, kind: str) -> Any:
        name = f"{self.name}ShareGroupState{self.suffix}{kind.title()}"
        return schema_class(f"{self.folder}.{kind}:{name}")

    def part(self, kind: str, name: str) -> Any:
        return schema_class(f"{self.folder}.{kind}:{name}")


def _no_fields(_: Any) -> dict[str, Any]:
    return {}


def _decode_result(part: Any) -> share_state.ShareStateReply:
    return share_state.ShareStateReply(part.error_code, part.error_message)


def _decode_state(part: Any) -> share_state.ShareStateReply:
    batches, totals, delays = _decode_batches(part.state_batches)
    state = share_state.ShareState(
        part.state_epoch,
        part.start_offset,
        tuple(map(share_state.StateBatch._make, batches)),
        totals or share_state.NO_DELIVERY_TOTALS,
        delays,
    )
    return share_state.ShareStateReply(part.error_code, part.error_message, state=state)


def _decode_summary(part: Any) -> share_state.ShareStateReply:
    summary = share_state.ShareStateSummary(
        part.state_epoch, part.leader_epoch, part.start_offset, part.delivery_complete_count
    )
    return share_state.ShareStateReply(part.error_code, part.error_message, summary=summary)


def _encode_batches(
    batches: Iterable[tuple[int, int, int, int]],
    totals: share_state.DeliveryTotals | None,
    delays: Sequence[share_state.RecordDelay],
    folder: str,
) -> tuple[Any, ...]:
    """Encode state batches; totals and delays, if any, are added as batches with special delivery states."""
    batch = schema_class(f"{folder}:StateBatch")
    if totals:
        of_totals = (
            (totals.handed_out, totals.confirmed, share_state.TOTALS_ON_WIRE, 0),
            (totals.expired, 0, share_state.EXPIRED_TOTAL_ON_WIRE, 0),
        )
        batches = (*batches, *of_totals)
    if delays:
        of_delays = (
            (one.offset, one.due_ms, share_state.DELAY_ON_WIRE, one.delivery_count) for one in delays
        )
        batches = (*batches, *of_delays)
    return tuple(
        batch(first_offset=first, last_offset=last, delivery_state=state, delivery_count=count)
        for first, last, state, count in batches
    )


def _decode_batches(
    sent: Iterable[Any],
) -> tuple[
    list[tuple[int, int, int, int]], share_state.DeliveryTotals | None, tuple[share_state.RecordDelay, ...]
]:
    """The inverse of `_encode_batches`."""
    batches: list[tuple[int, int, int, int]] = []
    totals: share_state.DeliveryTotals | None = None
    delays: list[share_state.RecordDelay] = []
    for one in sent:
        state = one.delivery_state
        if state == share_state.TOTALS_ON_WIRE:
            totals = (totals or share_state.NO_DELIVERY_TOTALS)._replace(
                handed_out=one.first_offset, confirmed=one.last_offset
            )
        elif state == share_state.EXPIRED_TOTAL_ON_WIRE:
            totals = (totals or share_state.NO_DELIVERY_TOTALS)._replace(expired=one.first_offset)
        elif state == share_state.DELAY_ON_WIRE:
            delays.append(share_state.RecordDelay(one.first_offset, one.delivery_count, one.last_offset))
        else:
            batches.append((one.first_offset, one.last_offset, state, one.delivery_count))
    return batches, totals, tuple(delays)


def _write_fields(write: share_state.WriteState) -> dict[str, Any]:
    return {
        "state_epoch": write.state_epoch,
        "leader_epoch": write.leader_epoch,
        "start_offset": write.start_offset,
        "delivery_complete_count": write.delivery_complete_count,
        "state_batches": _encode_batches(
            write.batches, write.totals, write.delays, "write_share_group_state.v1.request"
        ),
    }


def _decode_write(key: share_state.SharePartitionKey, part: Any) -> share_state.WriteState:
    batches, totals, delays = _decode_batches(part.state_batches)
    return share_state.WriteState(
        key,
        part.state_epoch,
        part.leader_epoch,
        part.start_offset,
        part.delivery_complete_count,
        batches,
        totals,
        delays,
    )


def _state_fields(reply: share_state.ShareStateReply) -> dict[str, Any]:
    state = reply.state or _NO_STATE
    totals = state.totals if any(state.totals) else None
    return {
        "state_epoch": state.state_epoch,
        "start_offset": state.start_offset,
        "state_batches": _encode_batches(
            state.batches, totals, state.delays, "read_share_group_state.v0.response"
        ),
    }


def _summary_fields(reply: share_state.ShareStateReply) -> dict[str, Any]:
    return (reply.summary or _NO_SUMMARY)._asdict()


#: Kafka's DeleteShareGroupState has no field for an epoch. We send it after its partition as an impossible number.
_EPOCH_BELOW: Final = -2


def _partition_and_epoch(delete: share_state.DeleteState) -> tuple[int, ...]:
    if delete.state_epoch == share_state.UNSET:
        return (delete.key.partition,)
    return (delete.key.partition, _EPOCH_BELOW - delete.state_epoch)


INITIALIZE: Final = StateApi(
    83,
    "Initialize",
    "initialize_share_group_state.v0",
    share_state.InitializeState,
    encode_part=lambda one: {"state_epoch": one.state_epoch, "start_offset": one.start_offset},
    decode_part=lambda key, part: share_state.InitializeState(key, part.state_epoch, part.start_offset),
    encode_result=_no_fields,
    decode_result=_decode_result,
)
READ: Final = StateApi(
    84,
    "Read",
    "read_share_group_state.v0",
    share_state.ReadState,
    encode_part=lambda one: {"leader_epoch": one.leader_epoch},
    decode_part=lambda key, part: share_state.ReadState(key, part.leader_epoch),
    encode_result=_state_fields,
    decode_result=_decode_state,
)
WRITE: Final = StateApi(
    85,
    "Write",
    "write_share_group_state.v1",
    share_state.WriteState,
    encode_part=_write_fields,
    decode_part=_decode_write,
    encode_result=_no_fields,
    decode_result=_decode_result,
)
DELETE: Final = StateApi(
    86,
    "Delete",
    "delete_share_group_state.v0",
    share_state.DeleteState,
    encode_part=_no_fields,
    decode_part=lambda key, part: share_state.DeleteState(key),
    encode_result=_no_fields,
    decode_result=_decode_result,
    numbers=_partition_and_epoch,
)
SUMMARY: Final = StateApi(
    87,
    "Read",
    "read_share_group_state_summary.v1",
    share_state.ReadStateSummary,
    encode_part=lambda one: {"leader_epoch": one.leader_epoch},
    decode_part=lambda key, part: share_state.ReadStateSummary(key, part.leader_epoch),
    encode_result=_summary_fields,
    decode_result=_decode_summary,
    suffix="Summary",
)
STATE_APIS: Final = {form.request: form for form in (INITIALIZE, READ, WRITE, DELETE, SUMMARY)}


def encode_request(form: StateApi, requests: Sequence[share_state.ShareStateRequest]) -> Any:
    """All requests must be for the same group."""
    topic_class = form.part("request", f"{form.name}State{form.suffix}Data")
    part_class = form.part("request", "PartitionData")
    topics = tuple(
        topic_class(
            topic_id=topic_id,
            partitions=tuple(
                part_class(partition=number, **form.encode_part(one))
                for one in of_topic
                for number in form.numbers(one)
            ),
        )
        for topic_id, of_topic in groupby(requests, key=lambda one: one.key.topic_id)
    )
    return form.message("request")(group_id=requests[0].key.group, topics=topics)


def decode_request(form: StateApi, request: Any) -> list[share_state.ShareStateRequest]:
    requests: list[share_state.ShareStateRequest] = []
    for topic in request.topics:
        for index, part in enumerate(topic.partitions):
            if form is DELETE and index and part.partition <= _EPOCH_BELOW:
                requests[-1] = share_state.DeleteState(requests[-1].key, _EPOCH_BELOW - part.partition)
            else:
                requests.append(
                    form.decode_part(
                        share_state.SharePartitionKey(request.group_id, topic.topic_id, part.partition), part
                    )
                )
    return requests


def encode_response(
    form: StateApi, partitions: Sequence[tuple[Any, int]], replies: Sequence[share_state.ShareStateReply]
) -> Any:
    """`partitions` are those of the request, as topic id and number."""
    topic_class = form.part("response", f"{form.name}State{form.suffix}Result")
    part_class = form.part("response", "PartitionResult")
    of_partition = zip(partitions, replies, strict=True)
    results = tuple(
        topic_class(
            topic_id=topic_id,
            partitions=tuple(
                part_class(
                    partition=partition,
                    error_code=reply.error,
                    error_message=reply.message,
                    **form.encode_result(reply),
                )
                for (_, partition), reply in of_topic
            ),
        )
        for topic_id, of_topic in groupby(of_partition, key=lambda one: one[0][0])
    )
    return form.message("response")(results=results)


def decode_response(form: StateApi, response: Any) -> list[share_state.ShareStateReply]:
    """Return the replies in the order of the requests."""
    return [form.decode_result(part) for topic in response.results for part in topic.partitions]
