"""Which quota applies to a client, and how long a client that exceeds it waits."""

import random

import pytest

from penstock.security.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    ClientQuotas,
    Limit,
    Meter,
    QuotaUsage,
    Rate,
    TokenBucket,
)

WINDOWS, WINDOW_MS = 11, 1000


def entity(**parts: str | None) -> tuple[tuple[str, str | None], ...]:
    names = {"user": "user", "client": "client-id"}
    return tuple(sorted((names[kind], name) for kind, name in parts.items()))


#: Most specific first.
ENTITIES = (
    entity(user="ann", client="app"),
    entity(user="ann", client=None),
    entity(user="ann"),
    entity(user=None, client="app"),
    entity(user=None, client=None),
    entity(user=None),
    entity(client="app"),
    entity(client=None),
)
SHARERS = (
    ("ann", "app"),
    ("ann", "app"),
    ("ann", None),
    ("ann", "app"),
    ("ann", "app"),
    ("ann", None),
    (None, "app"),
    (None, "app"),
)


@pytest.mark.parametrize("first", range(len(ENTITIES)))
def test_the_most_specific_entity_wins(first: int) -> None:
    quotas = ClientQuotas(
        {each: {PRODUCER_BYTE_RATE: float(place)} for place, each in enumerate(ENTITIES) if place >= first}
    )
    assert quotas.limit(PRODUCER_BYTE_RATE, "ann", "app") == Limit(first, SHARERS[first])
    assert quotas.limit(CONSUMER_BYTE_RATE, "ann", "app") is None


def test_an_entity_covers_no_others() -> None:
    quotas = ClientQuotas({entity(user="ann"): {PRODUCER_BYTE_RATE: 5.0}})
    assert quotas.limit(PRODUCER_BYTE_RATE, "bob", "app") is None
    assert quotas.limit(PRODUCER_BYTE_RATE, "ann", "any") == Limit(5.0, ("ann", None))
    by_client = ClientQuotas({entity(client="app"): {PRODUCER_BYTE_RATE: 5.0}})
    assert by_client.limit(PRODUCER_BYTE_RATE, "ann", "app") == by_client.limit(
        PRODUCER_BYTE_RATE, "bob", "app"
    ), "users share the quota of a client id"


def test_hosts_have_a_rate_of_connections_or_the_default() -> None:
    quotas = ClientQuotas(
        {
            ((IP, "10.0.0.1"),): {CONNECTION_CREATION_RATE: 3.0},
            ((IP, None),): {CONNECTION_CREATION_RATE: 7.0},
        }
    )
    assert [quotas.connection_rate(host) for host in ("10.0.0.1", "10.0.0.2")] == [3.0, 7.0]
    assert ClientQuotas({}).connection_rate("10.0.0.1") is None


def test_the_rate_of_a_host_holds_however_its_address_is_spelled() -> None:
    stored = {
        "2001:DB8:0::1": 1.0,
        "::ffff:10.0.0.9": 2.0,
        # Older versions stored every spelling; only this one has ever been in force.
        "2001:db8::2": 3.0,
        "2001:DB8::2": 4.0,
    }
    quotas = ClientQuotas({((IP, name),): {CONNECTION_CREATION_RATE: rate} for name, rate in stored.items()})
    hosts = ("2001:db8::1", "10.0.0.9", "2001:db8::2", "::ffff:10.0.0.9", "2001:db8::3")
    assert [quotas.connection_rate(host) for host in hosts] == [1.0, 2.0, 3.0, 2.0, None]


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_waits_as_told_stays_at_its_limit(seed: int) -> None:
    """Within 5 % over ten seconds and more, whatever the sizes and pauses of its requests."""
    chance = random.Random(seed)
    limit, rate, now_ms = chance.choice([1_000.0, 50_000.0, 2e7]), Rate(WINDOWS, WINDOW_MS), 1_000_000
    sent: list[tuple[int, float]] = []
    while now_ms < 1_000_000 + 120_000:
        amount = limit * chance.uniform(0.001, 0.5)
        rate.record(amount, now_ms)
        sent.append((now_ms, amount))
        now_ms += max(rate.throttle_ms(limit, now_ms), chance.randrange(20))
    begin = sent[0][0] + 20_000
    total = sum(amount for at, amount in sent if at >= begin)
    assert total * 1000 / (sent[-1][0] - begin) == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize("size_s", [0.1, 2.0, 40.0])
@pytest.mark.parametrize("connections", [1, 5, 50])
def test_the_waits_of_connections_that_share_a_limit_add_up(connections: int, size_s: float) -> None:
    """The average alone forgets what is older than the windows, so a request beyond them would be free in part."""
    limit, usage = 1_000.0, QuotaUsage(WINDOWS, WINDOW_MS)
    free_ms = [0] * connections
    total = 0.0
    while (now_ms := min(free_ms)) < 1_000_000:
        wait_ms = usage.record(limit * size_s, limit, now_ms)
        free_ms[free_ms.index(now_ms)] = now_ms + max(wait_ms, 1)
        total += limit * size_s
    seconds = 1_000 + WINDOWS - 1
    assert 0.95 * 1_000 * limit <= total <= limit * (1.01 * seconds + connections * size_s)


def test_a_reservation_that_ends_leaves_nothing_behind() -> None:
    limit, usage = 1_000.0, QuotaUsage(WINDOWS, WINDOW_MS)
    assert usage.left(limit) == 10_250
    usage.record(12_000, limit, 0)
    assert (usage.owed_ms(limit, 0), usage.left(limit)) == (2_000, 250)
    usage.reserve(500, limit, 0)
    assert usage.owed_ms(limit, 0) == 2_500
    usage.give_back(500)
    assert (usage.owed_ms(limit, 0), usage.owed_ms(limit, 2_000)) == (2_000, 0)


def test_a_burst_below_the_limit_of_ten_seconds_is_not_throttled() -> None:
    rate = Rate(WINDOWS, WINDOW_MS)
    rate.record(10_000, 5_000)
    assert rate.throttle_ms(1_000, 5_000) == 0
    rate.record(1_000, 5_000)
    assert rate.throttle_ms(1_000, 5_000) == 1_000
    assert rate.per_second(5_000 + WINDOWS * WINDOW_MS) == 0


@pytest.mark.parametrize("limit", [0.0, 1e-300, 2.0**63])
def test_limits_at_the_ends_of_the_range(limit: float) -> None:
    rate, bucket = Rate(WINDOWS, WINDOW_MS), TokenBucket(WINDOWS, WINDOW_MS)
    rate.record(1e6, 1_000)
    bucket.record(1e6, limit, 1_000)
    longest_ms = 3_600_000
    expected = 0 if limit > 1 else longest_ms
    assert rate.throttle_ms(limit, 1_000) == expected
    assert bucket.throttle_ms(limit, 1_000) == expected


def test_a_bucket_allows_a_burst_and_then_the_rate() -> None:
    bucket = TokenBucket(WINDOWS, WINDOW_MS)
    bucket.record(110, 10, 0)
    assert bucket.throttle_ms(10, 0) == 0, "the burst is what eleven windows allow"
    bucket.record(20, 10, 0)
    assert bucket.throttle_ms(10, 0) == 2_000
    assert bucket.throttle_ms(10, 2_000) == 0
    assert bucket.tokens(10, 100_000) == 110, "no more than a burst is saved up"


def test_what_is_idle_can_be_forgotten() -> None:
    rate, bucket = Rate(WINDOWS, WINDOW_MS), TokenBucket(WINDOWS, WINDOW_MS)
    rate.record(1, 0)
    bucket.record(1, 1, 0)
    assert not rate.is_idle(3_599_999)
    assert not bucket.is_idle(3_599_999)
    assert rate.is_idle(3_600_000)
    assert bucket.is_idle(3_600_000)


def test_what_is_pending_is_recorded_with_the_amount_that_is_too_much() -> None:
    """Clients that share a rate are throttled as if every amount were recorded at once, but for a thousandth."""
    chance = random.Random(5)
    ways = {True: 0, False: 0}
    for limit in (0.0, 1.0, 1_000.0, 1e6):
        shared, exact = QuotaUsage(WINDOWS, WINDOW_MS), Rate(WINDOWS, WINDOW_MS)
        meters = [Meter(name, Limit(limit, (None, None)), shared) for name in ("a", "b")]
        for _ in range(10_000):  # within one window, so that both rates have the same
            amount = chance.choice((0.0, 0.25, 100.0, 500.0))
            meter = chance.choice(meters)
            exact.record(amount, 5_000)
            is_pending = meter.pending + amount <= meter.slack
            ways[is_pending] += 1
            if is_pending:
                meter.pending += amount
            else:
                meter.record(amount, 5_000)
            pending = sum(each.pending for each in meters)
            assert pending <= 2 * limit / 1_000
            assert shared.per_second(5_000) + pending / 10 == pytest.approx(exact.per_second(5_000))
    assert min(ways.values()) > 5_000


def test_nothing_is_pending_in_a_meter_that_is_retired() -> None:
    for limit in (Limit(1_000.0, (None, "a")), None):
        meter = Meter("a", limit, QuotaUsage(WINDOWS, WINDOW_MS))
        assert meter.record(1.0, 5_000) == 0
        assert meter.pending + 1.0 <= meter.slack
        meter.retire()
        assert not meter.pending + 0.0 <= meter.slack


def test_without_a_limit_everything_may_be_pending() -> None:
    meter = Meter("a", None, QuotaUsage(WINDOWS, WINDOW_MS))
    assert meter.pending + 1e300 <= meter.slack
    meter.pending = 1e300
    assert meter.record(1e300, 0) == 0
