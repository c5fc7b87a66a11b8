"""For any valid requests from a client, other clients are served, also after a restart, and nothing is lost."""

import random
from pathlib import Path

import pytest
from tests.fuzz import state
from tests.fuzz.hostile import TABLE
from tests.fuzz.settings import LIMITING, TABLES, Settings, is_accepted

from penstock.broker.config.definitions import NODE_SETTINGS

REQUESTS = 2_000


@pytest.mark.parametrize("nodes", [1, 3])
def test_hostile_requests_do_no_harm_to_others(tmp_path: Path, nodes: int) -> None:
    report = state.run(tmp_path / "nodes", nodes=nodes, requests=REQUESTS, seed=13, bursts=1)
    assert report["apis"] == len(TABLE)
    assert report["apis_answered"] >= len(TABLE) - 1, (
        "one request between nodes has no answer with an error in it"
    )
    assert report["answered"] > REQUESTS / 2, "most requests must reach a handler, or this proves nothing"
    assert report["limits"] > 0, "settings of brokers are among what is sent"
    assert report["malformed"] == 0, "a request that does not parse proves nothing about the state behind it"


@pytest.mark.parametrize("kind", TABLES)
def test_every_setting_that_can_be_changed_is_sent_with_a_value_that_is_accepted(kind: int) -> None:
    settings = Settings(random.Random(13))
    sent: dict[str, set[str]] = {}
    for _ in range(6_000):
        for change in settings.changes(kind):
            if change.value is not None:
                sent.setdefault(change.name, set()).add(change.value)
    for name, setting in TABLES[kind].items():
        assert setting.read_only or any(is_accepted(setting, text) for text in sent[name]), name
    assert "unknown.name" in sent
    assert all(not NODE_SETTINGS[name].read_only for name in LIMITING)
