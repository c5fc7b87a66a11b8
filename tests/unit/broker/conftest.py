"""Fixtures of the broker's tests."""

import pytest

from penstock.broker.coordinators.runtime import runtime


@pytest.fixture(autouse=True)
def _requests_wait_until_the_coordinator_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look at single answers; a client would ask again after COORDINATOR_LOAD_IN_PROGRESS."""
    monkeypatch.setattr(runtime, "_LOAD_WAIT_S", 60.0)
