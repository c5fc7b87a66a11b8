import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks.reports import results_file

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
NAME = re.compile(r"\d{4}-\d\d-\d\d-(?P<commit>[0-9a-f]{7,40})-(?P<suite>[a-z]+)")


def problems(path: Path) -> list[str]:
    """Return what a published file lacks, by the form in benchmarks/published/README.md."""
    document = json.loads(path.read_text())
    missing = [field for field in results_file.FIELDS if field not in document]
    if missing:
        return [f"{path.name} has no {field}" for field in missing]
    name = NAME.fullmatch(path.stem)
    if name is None:
        return [f"{path.name} is not named DATE-COMMIT-SUITE.json"]
    return [
        f"{path.name} holds the {field} {document[field]}"
        for field in ("commit", "suite")
        if document[field] != name[field]
    ]


def test_facts_name_the_command_the_commit_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "orig_argv", ["/opt/bin/python3", "-m", "benchmarks", "--cluster", "--only", "failover-*"]
    )
    facts = results_file.run_facts("cluster", tmp_path, rounds=3)
    assert facts["command"] == "python -m benchmarks --cluster --only 'failover-*'"
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|unknown", facts["commit"])
    assert facts["machine"].keys() >= {"cpu", "cores", "memory_mb", "kernel", "python", "filesystem"}
    assert facts["rounds"] == 3


def test_a_file_has_the_published_form_if_it_is_named_after_its_clean_commit(tmp_path: Path) -> None:
    document = {
        **results_file.run_facts("cluster", tmp_path, rounds=1),
        "commit": "1a2b3c4",
        "results": [{"name": "rf3"}],
    }
    path = tmp_path / "2026-11-20-1a2b3c4-cluster.json"
    results_file.write_results(path, document)
    assert problems(path) == []
    results_file.write_results(path, {**document, "commit": "1a2b3c4-dirty"})
    assert problems(path) == [f"{path.name} holds the commit 1a2b3c4-dirty"]
    results_file.write_results(path, {key: value for key, value in document.items() if key != "machine"})
    assert problems(path) == [f"{path.name} has no machine"]


def test_published_files_have_the_form_and_are_linked_where_their_figures_stand() -> None:
    page = (PUBLISHED.parents[1] / "docs" / "benchmarks.md").read_text()
    for path in sorted(PUBLISHED.glob("*.json")):
        assert problems(path) == []
        assert f"benchmarks/published/{path.name}" in page
