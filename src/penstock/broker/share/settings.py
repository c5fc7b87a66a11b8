"""From a group's settings to the policy of its share partitions."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.groups.share_partition.policy import Backoff, Policy

if TYPE_CHECKING:
    from penstock.groups.config import GroupConfig


@lru_cache(maxsize=1024)
def policy_of(config: GroupConfig, topic: str) -> Policy:
    return Policy(
        lock_ms=config.share_record_lock_duration_ms,
        delivery_limit=config.share_delivery_count_limit,
        locks_max=config.share_partition_max_record_locks,
        may_renew=config.share_renew_acknowledge_enable,
        is_at_most_once=config.is_at_most_once,
        buries=config.dead_letter_topic_of(topic) is not None,
        backoff=_backoff(config),
    )


def _backoff(config: GroupConfig) -> Backoff | None:
    if config.share_backoff == "none":
        return None
    return Backoff(
        base_ms=config.share_backoff_ms,
        cap_ms=config.share_backoff_max_ms,
        jitter_ms=config.share_backoff_jitter_ms,
        is_exponential=config.share_backoff == "exponential",
    )
