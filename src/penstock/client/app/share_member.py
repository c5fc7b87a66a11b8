"""A member of a share group: it takes messages, and says of each what became of it. It belongs to one thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.client.app.committing import CommitLost, CommitRefused
from penstock.client.app.figures import Figures
from penstock.client.app.settings import ApplicationError, Settings
from penstock.client.app.share_failures import FailureReports, Told
from penstock.client.errors import ClientError

__all__ = ["ACCEPT", "REJECT", "RELEASE", "MemberLost", "ShareMember"]

_LOG: Final = logging.getLogger("penstock.client")
#: As the protocol numbers them: done; again, after the group's delay; never again.
ACCEPT, RELEASE, REJECT = 1, 2, 3


class MemberLost(ClientError):
    """It is of no use any more; another one may be."""


class ShareMember:
    """Figures count answers that were not kept as `late`; messages with such an answer may come again."""

    def __init__(
        self, settings: Settings, topics: Sequence[str], figures: Figures, reports: FailureReports | None
    ) -> None:
        """`reports` where brokers take delays and errors of single messages."""
        self._figures = figures
        self._reports = reports
        self._consumer = _consumer(settings)
        self._consumer.subscribe(list(topics))
        self._consumer.set_acknowledgement_commit_callback(self._told)

    def take(self, timeout_s: float) -> list[Any]:
        """Whole batches, as soon as there is something. All that was taken before has an answer. Raises ClientError."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            taken = list(self._consumer.poll(timeout_s))
        except KafkaException as error:
            if error.args[0].fatal():
                raise MemberLost(error.args[0].str()) from None
            raise _sentence(error) from None
        good = [raw for raw in taken if raw.error() is None]
        for raw in taken:
            if raw.error() is not None:
                # The library has answered for it: what cannot be read is rejected.
                _LOG.warning("%s[%s]@%s: %s", raw.topic(), raw.partition(), raw.offset(), raw.error().str())
        return good

    def answer(self, raw: Any, outcome: int, told: Told | None = None) -> None:
        """Sent with the next `take`, `send` or `settle`, and what is to be told of a failure before it."""
        from confluent_kafka import AcknowledgeType, IllegalStateException

        try:
            self._consumer.acknowledge(raw, AcknowledgeType(outcome))
        except IllegalStateException:
            self._figures.add("late")
            return
        if told is not None and self._reports is not None:
            self._reports.add(raw, told)

    def _report(self) -> None:
        if self._reports is not None:
            self._reports.send()

    def send(self) -> None:
        """Without waiting for whether it is kept."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            self._consumer.commit_async()
        except KafkaException as error:
            _LOG.warning("%s", _sentence(error))

    def settle(self, timeout_s: float) -> dict[tuple[str, int], ClientError]:
        """Partitions of which answers were not kept, and why. Raises CommitLost where nobody knows of any."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            told = self._consumer.commit_sync(timeout_s)
        except KafkaException as error:
            raise CommitLost(f"it is not known what was kept: {error.args[0].str()}") from None
        return {
            (place.topic, place.partition): _refusal(place, error)
            for place, error in told.items()
            if error is not None
        }

    def _told(self, offsets: Mapping[Any, set[int]], error: Any) -> None:
        if error is not None:
            count = sum(map(len, offsets.values()))
            self._figures.add("late", count)
            _LOG.warning("%d answers were not kept, and may be wanted again: %s", count, _sentence(error))

    def close(self) -> None:
        """Sends what was answered; what has no answer is for others, at once."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            self._consumer.close()
        except KafkaException as error:
            _LOG.warning("%s", _sentence(error))
        if self._reports is not None:
            self._reports.close()


def _consumer(settings: Settings) -> Any:
    from confluent_kafka import KafkaException

    try:
        from confluent_kafka import ShareConsumer
    except ImportError:
        raise ApplicationError("share groups need confluent-kafka 2.16 or newer") from None
    try:
        return ShareConsumer(settings)
    except KafkaException as error:
        raise ApplicationError(error.args[0].str()) from None


def _sentence(error: Any) -> ClientError:
    return ClientError(error.args[0].str())


def _refusal(place: Any, error: Any) -> ClientError:
    from confluent_kafka import KafkaError

    definite = error.args[0].code() in (KafkaError.INVALID_RECORD_STATE,)
    kind = CommitRefused if definite else CommitLost
    return kind(f"{place.topic}[{place.partition}]: what was said is not kept: {error.args[0].str()}")
