"""The settings of the group that a share subscription asks for."""

from typing import Any

from penstock.client.app.failures import Backoff
from penstock.client.app.share_group import share_group_settings
from penstock.client.app.subscription import declare_subscription


def asked(**how: Any) -> dict[str, str]:
    def work(job: bytes) -> None: ...

    return share_group_settings(declare_subscription(work, ("jobs",), group="workers", share=True, **how))


def test_a_backoff_is_the_groups_delay_and_limit() -> None:
    told = asked(retry=Backoff(base="250ms", cap="5m", attempts=7), lock="45s")
    assert told["penstock.share.backoff"] == "exponential"
    assert told["penstock.share.backoff.ms"] == "250"
    assert told["penstock.share.backoff.max.ms"] == "300000"
    assert told["penstock.share.backoff.jitter.ms"] == "-1", "as much as the base, as Backoff has it"
    assert told["share.delivery.count.limit"] == "7"
    assert told["share.record.lock.duration.ms"] == "45000"


def test_what_is_left_out_stays_as_the_group_has_it() -> None:
    told = asked()
    assert not any("backoff" in name or "limit" in name or "lock" in name for name in told)


def test_the_contract_and_the_start_are_always_said() -> None:
    told = asked(delivery="at-most-once", start="latest", dead_letters=False)
    assert told == {
        "share.auto.offset.reset": "latest",
        "share.isolation.level": "read_committed",
        "penstock.share.delivery": "at-most-once",
        "penstock.share.acquire.mode": "record_limit",
        "errors.deadletterqueue.topic.name": "",
    }
