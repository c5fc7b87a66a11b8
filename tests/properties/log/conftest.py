"""Properties open and close thousands of logs; what is synced when is for the unit tests to say."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_syncing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: None)
        patched.setattr(os, "fdatasync", lambda fd: None)
        yield
