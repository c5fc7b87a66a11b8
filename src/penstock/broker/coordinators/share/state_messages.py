"""The five requests about share state, between their messages and the questions that the rules know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from penstock.groups.share_state.values import (
    NO_TOTALS,
    TOTALS,
    TOTALS_EXPIRED,
    UNSET,
    Answer,
    Delete,
    Initialize,
    Key,
    Question,
    Read,
    ShareState,
    ShareSummary,
    StateBatch,
    Summary,
    Totals,
    Write,
)
from penstock.protocol.schemas import schema_class

_NO_STATE: Final = ShareState(0, 0)
_NO_SUMMARY: Final = ShareSummary(0, 0, 0, 0)


class Form(NamedTuple):
    """How one kind of question and its answers are put in messages of the newest version."""

    api_key: int
    name: str  # "Write" of WriteShareGroupState and WriteStateData
    folder: str
    question: type
    asked: Callable[[Any], dict[str, Any]]  # a question's fields
    read: Callable[[Key, Any], Question]
    told: Callable[[Answer], dict[str, Any]]  # an answer's fields
    heard: Callable[[Any], Answer]
    suffix: str = ""
    numbers: Callable[[Any], tuple[int, ...]] = lambda one: (one.key.partition,)

    def message(self, kind: str) -> Any:
        name = f"{self.name}ShareGroupState{self.suffix}{kind.title()}"
        return schema_class(f"{self.folder}.{kind}:{name}")

    def part(self, kind: str, name: str) -> Any:
        return schema_class(f"{self.folder}.{kind}:{name}")


def _no_fields(_: Any) -> dict[str, Any]:
    return {}


def _heard(part: Any) -> Answer:
    return Answer(part.error_code, part.error_message)


def _heard_state(part: Any) -> Answer:
    batches, totals = _split(part.state_batches)
    state = ShareState(
        part.state_epoch, part.start_offset, tuple(map(StateBatch._make, batches)), totals or NO_TOTALS
    )
    return Answer(part.error_code, part.error_message, state=state)


def _heard_summary(part: Any) -> Answer:
    summary = ShareSummary(
        part.state_epoch, part.leader_epoch, part.start_offset, part.delivery_complete_count
    )
    return Answer(part.error_code, part.error_message, summary=summary)


def _joined(
    batches: Iterable[tuple[int, int, int, int]], totals: Totals | None, folder: str
) -> tuple[Any, ...]:
    """State batches of a message, the totals among them, if there are any."""
    batch = schema_class(f"{folder}:StateBatch")
    if totals:
        of_totals = (totals.handed_out, totals.confirmed, TOTALS, 0), (totals.expired, 0, TOTALS_EXPIRED, 0)
        batches = (*batches, *of_totals)
    return tuple(
        batch(first_offset=first, last_offset=last, delivery_state=state, delivery_count=count)
        for first, last, state, count in batches
    )


def _split(sent: Iterable[Any]) -> tuple[list[tuple[int, int, int, int]], Totals | None]:
    """The other way round."""
    batches, totals = [], None
    for one in sent:
        state = one.delivery_state
        if state == TOTALS:
            totals = (totals or NO_TOTALS)._replace(handed_out=one.first_offset, confirmed=one.last_offset)
        elif state == TOTALS_EXPIRED:
            totals = (totals or NO_TOTALS)._replace(expired=one.first_offset)
        else:
            batches.append((one.first_offset, one.last_offset, state, one.delivery_count))
    return batches, totals


def _asked_write(write: Write) -> dict[str, Any]:
    return {
        "state_epoch": write.state_epoch,
        "leader_epoch": write.leader_epoch,
        "start_offset": write.start_offset,
        "delivery_complete_count": write.delivery_complete_count,
        "state_batches": _joined(write.batches, write.totals, "write_share_group_state.v1.request"),
    }


def _read_write(key: Key, part: Any) -> Write:
    epochs = part.state_epoch, part.leader_epoch
    return Write(key, *epochs, part.start_offset, part.delivery_complete_count, *_split(part.state_batches))


def _known(totals: Totals) -> Totals | None:
    return totals if any(totals) else None


def _told_state(answer: Answer) -> dict[str, Any]:
    state = answer.state or _NO_STATE
    return {
        "state_epoch": state.state_epoch,
        "start_offset": state.start_offset,
        "state_batches": _joined(state.batches, _known(state.totals), "read_share_group_state.v0.response"),
    }


def _told_summary(answer: Answer) -> dict[str, Any]:
    return (answer.summary or _NO_SUMMARY)._asdict()


#: Kafka's DeleteShareGroupState has no place for an epoch. It follows its partition, as a number that none can have.
_EPOCH_BELOW: Final = -2


def _numbers_and_epoch(delete: Delete) -> tuple[int, ...]:
    if delete.state_epoch == UNSET:
        return (delete.key.partition,)
    return (delete.key.partition, _EPOCH_BELOW - delete.state_epoch)


INITIALIZE: Final = Form(
    83,
    "Initialize",
    "initialize_share_group_state.v0",
    Initialize,
    asked=lambda one: {"state_epoch": one.state_epoch, "start_offset": one.start_offset},
    read=lambda key, part: Initialize(key, part.state_epoch, part.start_offset),
    told=_no_fields,
    heard=_heard,
)
READ: Final = Form(
    84,
    "Read",
    "read_share_group_state.v0",
    Read,
    asked=lambda one: {"leader_epoch": one.leader_epoch},
    read=lambda key, part: Read(key, part.leader_epoch),
    told=_told_state,
    heard=_heard_state,
)
WRITE: Final = Form(
    85,
    "Write",
    "write_share_group_state.v1",
    Write,
    asked=_asked_write,
    read=_read_write,
    told=_no_fields,
    heard=_heard,
)
DELETE: Final = Form(
    86,
    "Delete",
    "delete_share_group_state.v0",
    Delete,
    asked=_no_fields,
    read=lambda key, part: Delete(key),
    told=_no_fields,
    heard=_heard,
    numbers=_numbers_and_epoch,
)
SUMMARY: Final = Form(
    87,
    "Read",
    "read_share_group_state_summary.v1",
    Summary,
    asked=lambda one: {"leader_epoch": one.leader_epoch},
    read=lambda key, part: Summary(key, part.leader_epoch),
    told=_told_summary,
    heard=_heard_summary,
    suffix="Summary",
)
FORMS: Final = {form.question: form for form in (INITIALIZE, READ, WRITE, DELETE, SUMMARY)}


def request_of(form: Form, questions: Sequence[Question]) -> Any:
    """All of one group."""
    topic_class = form.part("request", f"{form.name}State{form.suffix}Data")
    part_class = form.part("request", "PartitionData")
    topics = tuple(
        topic_class(
            topic_id=topic_id,
            partitions=tuple(
                part_class(partition=number, **form.asked(one))
                for one in of_topic
                for number in form.numbers(one)
            ),
        )
        for topic_id, of_topic in groupby(questions, key=lambda one: one.key.topic_id)
    )
    return form.message("request")(group_id=questions[0].key.group, topics=topics)


def questions_of(form: Form, request: Any) -> list[Question]:
    questions: list[Question] = []
    for topic in request.topics:
        for place, part in enumerate(topic.partitions):
            if form is DELETE and place and part.partition <= _EPOCH_BELOW:
                questions[-1] = Delete(questions[-1].key, _EPOCH_BELOW - part.partition)
            else:
                questions.append(form.read(Key(request.group_id, topic.topic_id, part.partition), part))
    return questions


def response_of(form: Form, asked: Sequence[tuple[Any, int]], answers: Sequence[Answer]) -> Any:
    """`asked` are topic ids and partitions."""
    topic_class = form.part("response", f"{form.name}State{form.suffix}Result")
    part_class = form.part("response", "PartitionResult")
    told = zip(asked, answers, strict=True)
    results = tuple(
        topic_class(
            topic_id=topic_id,
            partitions=tuple(
                part_class(
                    partition=partition,
                    error_code=answer.error,
                    error_message=answer.message,
                    **form.told(answer),
                )
                for (_, partition), answer in of_topic
            ),
        )
        for topic_id, of_topic in groupby(told, key=lambda one: one[0][0])
    )
    return form.message("response")(results=results)


def answers_of(form: Form, response: Any) -> list[Answer]:
    """In the order of the questions."""
    return [form.heard(part) for topic in response.results for part in topic.partitions]
