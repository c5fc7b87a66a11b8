"""How many connections a listener takes, and how fast: limits of its own beside those of the whole node."""

import asyncio
from pathlib import Path

import pytest
from tests.unit.broker.raw_client import API_VERSIONS, Client, frame, running, until

from penstock.broker.config.effective_settings import DynamicSettings
from penstock.broker.config.node_settings import InvalidSetting, load_settings
from penstock.broker.network.connection_limits import ConnectionLimits

TWO_LISTENERS = {"listeners": "INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:0"}
HOST = "10.0.0.1"


def limits(**given: str) -> ConnectionLimits:
    settings = load_settings(
        TWO_LISTENERS | {name.replace("__", "."): text for name, text in given.items()}, {}
    )
    return ConnectionLimits(settings, DynamicSettings(settings))


async def connect(node, listener: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", node.listeners[listener].port))


async def test_a_full_listener_takes_no_more_and_others_do(tmp_path: Path) -> None:
    own = {"listener.name.outside.max.connections": "2"}
    async with running(tmp_path, **TWO_LISTENERS, **own) as node:
        first = await connect(node, 1)
        await first.ask(frame(API_VERSIONS, 0))
        second = await connect(node, 1)
        await second.ask(frame(API_VERSIONS, 0))
        assert await (await connect(node, 1)).is_cut_off()
        assert node.metrics.connections_refused == 1
        inside = [await connect(node, 0) for _ in range(3)]
        for client in inside:
            await client.ask(frame(API_VERSIONS, 0))
        first.writer.close()
        await until(lambda: len(node.server.connections) == 1 + len(inside))
        await (await connect(node, 1)).ask(frame(API_VERSIONS, 0))


def test_the_limits_of_a_listener_and_of_the_node_both_apply() -> None:
    both = limits(listener__name__outside__max__connections="3", max__connections="4")
    exceeded = [both.admit("OUTSIDE", HOST, is_from_node=False) for _ in range(4)]
    assert exceeded == [None, None, None, "listener.name.outside.max.connections"]
    both.forget("OUTSIDE", HOST, is_from_node=False)
    assert both.admit("INSIDE", HOST, is_from_node=False) is None
    assert both.admit("INSIDE", HOST, is_from_node=False) == "max.connections"


def test_a_limit_of_the_inter_broker_listener_itself_applies_to_nodes() -> None:
    own = limits(listener__name__inside__max__connections="1", max__connections="0")
    assert own.admit("INSIDE", HOST, is_from_node=True) is None
    assert own.admit("INSIDE", HOST, is_from_node=True) == "listener.name.inside.max.connections"


def test_a_listener_spreads_out_its_connections_alone() -> None:
    own = limits(listener__name__outside__max__connection__creation__rate="10")

    def delays(listener: str, count: int, now: float) -> list[int]:
        return [own.delay_ms(listener, HOST, now, is_inter_broker=False) for _ in range(count)]

    # The worth of one second at once, and then one every 100 ms.
    assert delays("OUTSIDE", 13, 100.0) == [0] * 11 + [100, 200]
    assert delays("INSIDE", 50, 100.0) == [0] * 50
    assert delays("OUTSIDE", 1, 200.0) == [0]


def test_the_longest_of_the_delays_applies() -> None:
    both = limits(
        listener__name__outside__max__connection__creation__rate="1", max__connection__creation__rate="2"
    )
    both.rate_of = lambda host: 4.0
    delays = [both.delay_ms("OUTSIDE", HOST, 100.0, is_inter_broker=False) for _ in range(3)]
    assert delays == [0, 0, 1000]
    # Nodes wait only for the rate of their own listener.
    assert both.delay_ms("INSIDE", HOST, 100.0, is_inter_broker=True) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max.connections", "-1"),
        ("max.connection.creation.rate", "0"),
        ("connection.failed.authentication.delay.ms", "-1"),
        ("penstock.authentication.timeout.ms", "0"),
        ("penstock.unauthenticated.connections.max", "none"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=setting.replace(".", r"\.")):
        load_settings(TWO_LISTENERS | {f"listener.name.outside.{setting}": value}, {})


def test_only_what_a_listener_can_limit_has_its_prefix() -> None:
    with pytest.raises(InvalidSetting, match="Unknown setting listener"):
        load_settings(TWO_LISTENERS | {"listener.name.outside.max.connections.per.ip": "1"}, {})
