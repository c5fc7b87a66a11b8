"""The node settings that the rules of transactions depend on, by Kafka's names."""

from dataclasses import dataclass

_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSettings:
    timeout_max_ms: int = 900_000  # transaction.max.timeout.ms
    id_expiration_ms: int = 7 * _DAY_MS  # transactional.id.expiration.ms
    timed_out_check_interval_ms: int = 10_000  # transaction.abort.timed.out.transaction.cleanup.interval.ms
    expired_check_interval_ms: int = 3_600_000  # transaction.remove.expired.transaction.cleanup.interval.ms
    two_phase_enabled: bool = True  # transaction.two.phase.commit.enable
