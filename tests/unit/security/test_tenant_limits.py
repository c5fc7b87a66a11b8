"""The rates of a tenant, and how nodes share a limit that holds for all of them together."""

import pytest

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.tenant_usage import (
    TenantUsage,
    decode_usage,
    encode_usage,
    encode_usage_request,
    parse_usage_request,
)
from penstock.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from penstock.security.tenant_limits import REQUEST_RATE, TenantRates, next_grant


def settled(limit: float, demands: list[float], rounds: int = 60) -> list[float]:
    """Return what each node serves in the end, if every node would serve its demand."""
    nodes = len(demands)
    grants = [limit] * nodes
    for _ in range(rounds):
        served = [min(grant, demand) for grant, demand in zip(grants, demands, strict=True)]
        grants = [
            next_grant(grants[node], limit, elsewhere=sum(served) - served[node], nodes=nodes)
            for node in range(nodes)
        ]
    return [min(grant, demand) for grant, demand in zip(grants, demands, strict=True)]


@pytest.mark.parametrize(
    ("demands", "served"),
    [
        ([500.0], [90.0]),
        ([500.0, 500.0], [45.0, 45.0]),
        ([500.0, 500.0, 500.0], [30.0, 30.0, 30.0]),
        ([500.0, 10.0, 0.0], [80.0, 10.0, 0.0]),
        ([500.0, 500.0, 10.0], [40.0, 40.0, 10.0]),
        ([10.0, 10.0, 10.0], [10.0, 10.0, 10.0]),
        ([500.0] * 9, [10.0] * 9),
    ],
)
def test_nodes_grant_what_others_leave_of_a_limit(demands: list[float], served: list[float]) -> None:
    assert settled(90.0, demands) == pytest.approx(served, rel=0.05)


def test_a_rate_is_limited_on_average_over_the_windows() -> None:
    rates = TenantRates(11, 1000)
    rates.limit({REQUEST_RATE: 100, "partitions_max": 5})
    now_ms, served = 0, 0
    while now_ms < 60_000:
        wait_ms = rates.record(REQUEST_RATE, 1, now_ms)
        served += 1
        now_ms += wait_ms + 1
    # A burst of ten seconds' worth may come first.
    assert 100 * 60 * 0.95 <= served <= (100 * 60 + 1000) * 1.05
    assert rates.totals[REQUEST_RATE] == served
    assert rates.throttled_ms > 0


def test_what_is_not_limited_is_measured_and_a_limit_that_stays_keeps_its_grant() -> None:
    rates = TenantRates(11, 1000)
    assert rates.record(PRODUCER_BYTE_RATE, 10**9, 0) == 0
    assert rates.per_second(PRODUCER_BYTE_RATE, 0) == pytest.approx(10**8)
    rates.limit({CONSUMER_BYTE_RATE: 90})
    rates.settle({CONSUMER_BYTE_RATE: 90.0}, 3)
    grant = rates.grant(CONSUMER_BYTE_RATE)
    assert grant == pytest.approx(70.0)
    rates.limit({CONSUMER_BYTE_RATE: 90, PRODUCER_BYTE_RATE: 5})
    assert (rates.grant(CONSUMER_BYTE_RATE), rates.grant(PRODUCER_BYTE_RATE)) == (grant, 5)
    rates.limit({CONSUMER_BYTE_RATE: 60})
    assert (rates.grant(CONSUMER_BYTE_RATE), rates.grant(PRODUCER_BYTE_RATE)) == (60, None)


def test_a_wait_is_as_long_as_what_is_owed() -> None:
    rates = TenantRates(11, 1000)
    rates.limit({PRODUCER_BYTE_RATE: 1_000})
    assert rates.record(PRODUCER_BYTE_RATE, 60_000, 0) == 50_000
    assert rates.record(PRODUCER_BYTE_RATE, 1_000, 20_000) == 31_000


def test_usage_is_read_as_it_was_written() -> None:
    usage = {"acme": TenantUsage(1, 2, 3, 2**62, 0.5, 1.5, 2.5, 9), "b": TenantUsage()}
    encoded = encode_usage(usage)
    assert decode_usage(memoryview(b"head" + encoded), 4) == usage
    assert parse_usage_request(memoryview(encode_usage_request(of_cluster=True)))
    assert not parse_usage_request(memoryview(encode_usage_request(of_cluster=False)))
    for size in range(len(encoded)):
        with pytest.raises(MalformedFrame):
            decode_usage(memoryview(encoded[:size]))
    with pytest.raises(MalformedFrame):
        parse_usage_request(memoryview(b""))
    assert usage["acme"].plus(usage["acme"]).stored_bytes == 2**63
