"""Whatever valid requests a client sends, other clients are served, also after a restart, and nothing is lost."""

from pathlib import Path

import pytest
from tests.fuzz import state
from tests.fuzz.hostile import TABLE

REQUESTS = 2_000


@pytest.mark.parametrize("nodes", [1, 3])
def test_hostile_requests_do_no_harm_to_others(tmp_path: Path, nodes: int) -> None:
    report = state.run(tmp_path / "nodes", nodes=nodes, requests=REQUESTS, seed=13, bursts=1)
    assert report["apis"] == len(TABLE)
    assert report["apis_answered"] >= len(TABLE) - 1, (
        "one request between nodes has no answer with an error in it"
    )
    assert report["answered"] > REQUESTS / 2, "most requests must reach a handler, or this proves nothing"
    assert report["malformed"] == 0, "a request that does not parse proves nothing about the state behind it"
