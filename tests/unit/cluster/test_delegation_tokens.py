"""Delegation tokens: what the controller decides about creating, renewing, expiring and removing them."""

from typing import Any

import pytest

from penstock.cluster.controller.delegation_tokens import (
    TokenLifetimes,
    TokenLimits,
    create_token,
    expire_token,
    remove_expired_tokens,
    renew_token,
)
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode

LIFETIMES = TokenLifetimes(max_ms=7_000, expiry_ms=1_000)
ALICE, BOB, CAROL = "User:alice", "User:bob", "User:carol"


def create(image: ClusterImage, token_id: str = "a", **changed: Any) -> Any:
    given = {
        "owner": ALICE,
        "requester": ALICE,
        "renewers": (BOB,),
        "max_lifetime_ms": -1,
        "lifetimes": LIFETIMES,
        "limits": TokenLimits(tokens_max=10, per_owner_max=10),
        "now_ms": 100,
        **changed,
    }
    decision = create_token(image, token_id, **given)
    image.apply(decision.records)
    return decision.reply


def renew(image: ClusterImage, token_id: str | None = "a", **changed: Any) -> int:
    given = {"principal": ALICE, "period_ms": -1, "lifetimes": LIFETIMES, "now_ms": 500, **changed}
    decision = renew_token(image, token_id, **given)
    image.apply(decision.records)
    return decision.reply


def expire(image: ClusterImage, token_id: str | None = "a", **changed: Any) -> int:
    decision = expire_token(
        image, token_id, **{"principal": ALICE, "period_ms": -1, "now_ms": 500, **changed}
    )
    image.apply(decision.records)
    return decision.reply


@pytest.mark.parametrize(
    ("wanted_ms", "max_timestamp", "expires"),
    [(-1, 7_100, 1_100), (0, 7_100, 1_100), (500, 600, 600), (3_000, 3_100, 1_100), (2**62, 7_100, 1_100)],
)
def test_lifetimes_of_a_new_token(wanted_ms: int, max_timestamp: int, expires: int) -> None:
    token = create(ClusterImage(), max_lifetime_ms=wanted_ms)
    assert (token.issue_timestamp, token.max_timestamp, token.expiration_timestamp) == (
        100,
        max_timestamp,
        expires,
    )


def test_the_end_of_time() -> None:
    longest = TokenLifetimes(2**62, 2**62)
    image = ClusterImage()
    assert create(image, lifetimes=longest).max_timestamp < 2**48
    assert expire(image, period_ms=2**62) < 2**48


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"renewers": ("Group:x",)}, ErrorCode.invalid_principal_type),
        ({"renewers": (BOB,) * 101}, ErrorCode.invalid_request),
        ({"owner": "User:" + "x" * 1024}, ErrorCode.invalid_request),
        ({"limits": TokenLimits(0, 9)}, ErrorCode.policy_violation),
        ({"limits": TokenLimits(9, 0)}, ErrorCode.policy_violation),
    ],
)
def test_tokens_that_are_not_created(changed: dict[str, Any], error: ErrorCode) -> None:
    image = ClusterImage()
    with pytest.raises(ApiError) as caught:
        create(image, **changed)
    assert caught.value.code is error
    assert not image.security.tokens


@pytest.mark.parametrize("principal", [ALICE, BOB])
def test_owner_and_renewers_renew(principal: str) -> None:
    image = ClusterImage()
    create(image)
    assert renew(image, principal=principal) == 1_500
    assert renew(image, principal=principal, period_ms=300) == 800
    assert renew(image, principal=principal, period_ms=300_000, now_ms=700) == 1_700
    assert image.security.tokens["a"].expiration_timestamp == 1_700


def test_nothing_lives_longer_than_its_longest_lifetime() -> None:
    image = ClusterImage()
    create(image, max_lifetime_ms=1_200)
    assert renew(image) == 1_300
    assert expire(image, period_ms=10_000) == 1_300


def test_a_token_that_has_expired_can_be_removed() -> None:
    image = ClusterImage()
    create(image)
    assert expire(image, now_ms=1_500) == 1_500
    assert not image.security.tokens


def test_expiring() -> None:
    image = ClusterImage()
    create(image)
    assert expire(image, period_ms=200) == 700
    assert image.security.tokens["a"].expiration_timestamp == 700
    assert expire(image, principal=BOB) == 500
    assert not image.security.tokens


@pytest.mark.parametrize("change", [renew, expire])
def test_what_cannot_be_changed(change: Any) -> None:
    image = ClusterImage()
    create(image)
    for changed, error in (
        ({"token_id": "b"}, ErrorCode.delegation_token_not_found),
        ({"token_id": None}, ErrorCode.delegation_token_not_found),
        ({"principal": CAROL}, ErrorCode.delegation_token_owner_mismatch),
        ({"now_ms": 1_101, "period_ms": 1}, ErrorCode.delegation_token_expired),
    ):
        with pytest.raises(ApiError) as caught:
            change(image, **changed)
        assert caught.value.code is error
    assert image.security.tokens["a"].expiration_timestamp == 1_100


def test_expired_tokens_are_removed() -> None:
    image = ClusterImage()
    create(image, "a")
    create(image, "b", now_ms=900)
    decision = remove_expired_tokens(image, 1_500)
    image.apply(decision.records)
    assert decision.reply == 1
    assert set(image.security.tokens) == {"b"}
    assert remove_expired_tokens(image, 1_500).records == ()
