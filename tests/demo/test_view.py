"""The screen of the demo: it fits the terminal and shows failures."""

import io

import pytest
from rich.console import Console

from penstock.demo.scene import Event, Flow, FlowKind, Health, LatestDeadLetter, RateMeter, Sale, Scene
from penstock.demo.view import branches, draw, sparkline, summary_lines

LETTER = LatestDeadLetter(
    error="NoPrice", message="no price for special offer 2", origin="orders[1] @ 7", value='{"id":"o-1"}'
)


def scene(trouble: str | None = None) -> Scene:
    flows = (
        Flow(name="shop", last=(), kind=FlowKind.SHOP, note="sells"),
        Flow(name="orders", last=(True,), kind=FlowKind.TOPIC, note="topic", per_s=40.0, total=12_345),
        Flow(
            name="billing",
            last=(True, False),
            kind=FlowKind.SUBSCRIBER,
            note="plain",
            lag=678,
            trouble=trouble,
        ),
        *(
            Flow(name=f"topic-{number}", last=(True, True), kind=FlowKind.TOPIC, note="more", total=0)
            for number in range(14)
        ),
    )
    return Scene(
        now_s=75,
        address="localhost:9092",
        data="data",
        broker=Health.UP,
        spark=Health.STARTING,
        spark_note="is starting",
        flows=flows,
        sales=(Sale(window="12:00:10", product="coffee", orders=3, total=26.7),),
        latest_dead_letter=LETTER,
        dead_letters=5,
        replayed=3,
        duplicates_dropped=2,
        events=tuple(Event(at_s=number, text=f"event {number} {'x' * 200}") for number in range(20)),
    )


def drawn(seen: Scene, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(draw(seen, width=width, height=height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 30), (80, 24), (80, 20), (200, 60)])
def test_it_fits_the_screen(width: int, height: int) -> None:
    lines = drawn(scene(), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert all(word in text for word in ("12,345", "678", "Spark is starting", "localhost:9092", "NoPrice"))


def test_a_screen_of_usual_size_tells_why_the_last_letter_died() -> None:
    text = "\n".join(drawn(scene(), 100, 31))
    assert all(word in text for word in ("NoPrice", LETTER.message, "5 in all, 3 replayed, 2 wait", "coffee"))
    assert "event 19" in text


def test_a_small_screen_still_tells_the_latest_of_each() -> None:
    text = "\n".join(drawn(scene(), 80, 24))
    assert all(word in text for word in ("NoPrice", LETTER.message, "event 19", "topic-13"))


def test_trouble_is_said_where_it_is() -> None:
    (line,) = [line for line in drawn(scene("no broker answers"), 100, 30) if "billing" in line]
    assert "no broker answers" in line


def test_lines_tell_the_same() -> None:
    totals, lags = summary_lines(scene())
    assert "orders 12,345 (40/s)" in totals
    assert "billing 678" in lags


def test_branches_show_what_stands_below_what() -> None:
    assert branches(()) == ""
    assert branches((True,)) == "└─▶ "
    assert branches((True, False)) == "   ├─▶ "
    assert branches((True, False, True)) == "   │  └─▶ "


def test_sparklines_are_as_high_as_their_highest() -> None:
    assert sparkline([0, 5, 10]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"


def test_a_meter_tells_the_rate_of_the_last_seconds_only() -> None:
    meter = RateMeter()
    assert meter.per_s is None
    for second in range(30):
        meter.feed(second * 100, second)
    for second in range(30, 45):
        meter.feed(3_000, second)
    assert meter.per_s == 0
    assert meter.history[0] == 100
    assert meter.history[-1] == 0


def test_a_meter_restarts_with_its_counter() -> None:
    meter = RateMeter()
    meter.feed(1_000, 0)
    meter.feed(0, 1)
    meter.feed(50, 2)
    assert meter.per_s == 50
