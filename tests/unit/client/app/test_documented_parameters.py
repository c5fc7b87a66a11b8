"""The parameters of an application: explicit, checked, and all of them documented."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.client import ApplicationError, Backoff, Penstock
from penstock.client.app.subscription import declare_subscription

PAGE = Path(__file__).parents[4] / "docs" / "application-parameters.md"
DOCUMENTED: dict[str, Callable[..., Any]] = {
    "Penstock": Penstock.__init__,
    "publish": Penstock.publish,
    "subscribe": Penstock.subscribe,
    "consumer": Penstock.consumer,
    "create_topic": Penstock.create_topic,
}


def parameters(of: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(of).parameters.items() if name != "self"}


def test_nothing_is_taken_by_the_way() -> None:
    for name, each in inspect.getmembers(Penstock, inspect.isfunction):
        kinds = {parameter.kind for parameter in inspect.signature(each).parameters.values()}
        assert name.startswith("_") or inspect.Parameter.VAR_KEYWORD not in kinds, name


def test_what_is_declared_is_what_is_checked() -> None:
    ours, theirs = parameters(Penstock.subscribe), parameters(declare_subscription)
    by_name = inspect.Parameter.KEYWORD_ONLY
    assert {
        n: (p.default, p.annotation)
        for n, p in ours.items()
        if p.kind is by_name and n not in ("store", "ledger")
    } == {
        n: (p.default, p.annotation)
        for n, p in theirs.items()
        if p.kind is by_name and n not in ("store", "ledger")
    }


def test_those_for_coroutines_take_the_same() -> None:
    assert parameters(Penstock.aconsumer) == parameters(Penstock.consumer)
    assert parameters(Penstock.publish) == parameters(Penstock.publish_soon) == parameters(Penstock.apublish)


@pytest.mark.parametrize("call", DOCUMENTED)
def test_every_parameter_is_on_the_page_with_its_default(call: str) -> None:
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (table,) = [each for each in section if each.startswith(f"`{call}`")]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, flags=re.MULTILINE))
    told = parameters(DOCUMENTED[call])
    assert list(rows) == list(told)
    for name, each in told.items():
        wanted = "required" if each.default is inspect.Parameter.empty else f"`{_written(each.default)}`"
        assert rows[name].strip() == wanted, name


def _written(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


def work(value: bytes) -> None: ...


def test_a_number_of_attempts_is_a_retry() -> None:
    assert declare_subscription(work, ("orders",), group="g", retry=3).retry == Backoff(attempts=3)


@pytest.mark.parametrize("retry", [0, -1, True, "3 times", 2.5])
def test_what_is_no_retry_is_refused_in_a_sentence(retry: Any) -> None:
    with pytest.raises(ApplicationError, match="must be a Backoff or the number"):
        declare_subscription(work, ("orders",), group="g", retry=retry)


def test_one_group_keeps_one_contract() -> None:
    app = Penstock("127.0.0.1:1")
    app.subscribe("orders", group="billing")(work)
    app.subscribe("refunds", group="billing")(work)
    app.subscribe("orders", group="others", delivery="at-most-once")(work)
    with pytest.raises(
        ApplicationError,
        match="work uses group billing with at-least-once; use another group for at-most-once",
    ):
        app.subscribe("orders", group="billing", delivery="at-most-once")(work)
    with pytest.raises(ApplicationError, match="use another group for at-least-once as a share group"):
        app.subscribe("orders", group="billing", share=True)(work)
