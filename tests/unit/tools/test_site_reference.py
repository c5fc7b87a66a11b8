"""The generated reference pages of the site name every setting, metric, command and public name."""

import ast
import importlib
import re
import urllib.request
from pathlib import Path

import pytest
from tools.site import metric_families, reference, repository

from penstock.cli.commands import VERBS
from penstock.testing import EmbeddedBroker

SOURCES = repository.ROOT / "src" / "penstock"
DECLARATION = re.compile(r"^([A-Z_]+_SETTINGS): (?:Final\[)?dict\[str, Setting\]", re.MULTILINE)


def test_every_setting_is_on_the_page() -> None:
    page = reference.settings_page()
    declared = {
        name
        for path in SOURCES.rglob("*.py")
        for table in DECLARATION.findall(path.read_text())
        for name in getattr(importlib.import_module(module_name(path)), table)
    }
    assert len(declared) > 250
    assert {name for name in declared if f"| `{name}` |" not in page} == set()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)


def test_a_setting_has_its_type_default_values_and_meaning() -> None:
    (row,) = re.findall(r"^\| `num.partitions` .*$", reference.settings_page(), re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["`num.partitions`", "int", "`1`", "at least 1", "yes", "`PENSTOCK_NUM_PARTITIONS`"]
    assert cells[6]


def test_every_metric_name_in_the_source_is_on_the_page() -> None:
    page = reference.metrics_page()
    named = {
        node.value
        for path in metric_families.PACKAGE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"penstock_[a-z_]+", str(node.value))
    }
    assert len(named) > 80
    assert {name for name in named if f"| `{name}` |" not in page} == set()


def test_the_page_describes_metrics_as_a_node_reports_them() -> None:
    with (
        EmbeddedBroker(settings={"penstock.http.listen": "127.0.0.1:0"}) as broker,
        urllib.request.urlopen(f"{broker.http_url}/metrics", timeout=60) as answer,
    ):
        text = answer.read().decode()
    described = {each.name: each for each in metric_families.declared_families()}
    reported = re.findall(r"^# HELP (penstock_\w+) (.*)\n# TYPE \w+ (\w+)$", text, re.MULTILINE)
    assert len(reported) > 50
    for name, meaning, kind in reported:
        family = described[name.removesuffix("_total") if kind == "counter" else name]
        assert (family.kind, family.help) == (kind, meaning)
        for labels in re.findall(rf"^{name}(?:_bucket)?\{{(.*)\}} ", text, re.MULTILINE):
            assert set(re.findall(r'(\w+)="', labels)) - {"le"} == set(family.labels), name


def test_a_metric_whose_name_is_not_a_literal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.py").write_text(
        "def families(node):\n    yield gauge('penstock_' + node.name, 'Text.', 1)\n"
    )
    monkeypatch.setattr(metric_families, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match=r"odd.py:2: the name, help and labels must be literals"):
        metric_families.declared_families()


def test_every_command_is_on_the_page() -> None:
    headings = re.findall(r"^##+ penstock (.+)$", reference.commands_page(), re.MULTILINE)
    assert {words.split()[0] for words in headings} == set(VERBS)
    sources = "".join(path.read_text() for path in (SOURCES / "cli").rglob("*.py"))
    declared = re.findall(r"app\.command\((?!.*hidden=True)", sources)
    groups = {words.rsplit(" ", 1)[0] for words in headings if " " in words}
    assert len([words for words in headings if " " in words and words not in groups]) == len(declared) > 30


def test_options_of_a_command_are_on_the_page() -> None:
    page = reference.commands_page()
    section = page[page.index("### penstock topic create") :].split("\n### ")[0]
    assert "`-p, --partitions" in section


@pytest.mark.parametrize("package", reference.API_PACKAGES)
def test_public_names_can_be_imported(package: str) -> None:
    names = reference.public_names(package)
    module = importlib.import_module(package)
    assert len(names) >= 5
    assert set(getattr(module, "__all__", ())) <= set(names)
    page = reference.api_page(package)
    for name in names:
        assert hasattr(module, name)
        assert f"::: {package}.{name}\n" in page or f"## {name}\n" in page


def test_links_out_of_the_documentation_lead_to_pages_of_the_site() -> None:
    text = "[an example](../examples/work_queue.py) [home](../README.md#start) [Kafka](https://kafka.apache.org)\n"
    assert repository.with_site_links(text, "docs/queues.md") == (
        "[an example](repository/examples/work_queue.py.md) [home](index.md#start) [Kafka](https://kafka.apache.org)\n"
    )
    assert repository.with_site_links("[queues](docs/queues.md)", "README.md") == "[queues](queues.md)"


def test_a_link_to_a_missing_file_and_code_stay_as_they_are() -> None:
    text = "[gone](../examples/gone.py)\n```\n[code](../README.md)\n```\n"
    assert repository.with_site_links(text, "docs/queues.md") == text


def test_pages_for_linked_files_are_found_through_other_files() -> None:
    pages = repository.extra_pages({"README.md", "docs/migrating.md"})
    assert isinstance(pages["index.md"], str)
    assert "step0_loop" in str(pages["repository/examples/migrating/step0_loop.py.md"])
    assert repository.repository_path("repository/examples/work_queue.py.md") == "examples/work_queue.py"
