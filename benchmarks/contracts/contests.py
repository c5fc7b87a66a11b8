"""Who is measured: the application layer under each contract, and beside it the loop that people write by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contracts.messages import Kind
from benchmarks.contracts.stage import (
    BATCHED,
    FAST,
    KINDS,
    PUBLISHED,
    SINGLE,
    STORED,
    Pace,
    Stage,
    TurnFailed,
    rates,
)
from benchmarks.rounds import Round, Rounds, Turn

#: Of `subscribe`, and so of the loops beside it.
COMMIT_EVERY_S = 0.1
#: With the library's own (a second), a loop that does nothing waits for most of its time; applications have this one.
TUNED = {"fetch.queue.backoff.ms": 50}
_COPIES = "copies"

Asked = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """What its process is asked for; `beside` names the loop that its figures are divided by."""

    name: str
    title: str
    asked: Mapping[str, Any]
    beside: str | None = None
    #: Kinds of databases, by the name of the argument that takes the URL of one.
    databases: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        return self.beside is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    name: str
    title: str
    kind: Kind
    speed: str
    contenders: tuple[Contender, ...]


@dataclass(slots=True, kw_only=True)
class Result(Rounds):
    contest: Contest


# -- who takes part ------------------------------------------------------------------------------------


def _bare(name: str, title: str, *, touch: str = "message", commits: str = "after", **more: Any) -> Contender:
    common = {"commit_every_s": COMMIT_EVERY_S, "settings": TUNED, "to": None}
    asked = {"touch": touch, "commits": commits, **common, **more}
    return Contender(name=name, title=title, asked=asked)


def _ours(
    name: str,
    title: str,
    beside: str,
    *,
    handler: str = "message",
    databases: Mapping[str, str] | None = None,
    **how: Any,
) -> Contender:
    asked = {"handler": handler, "how": how}
    return Contender(name=name, title=title, asked=asked, beside=beside, databases=databases or {})


BARE = _bare("bare", "consume(500)")
BARE_BYTES = _bare("bare-bytes", "consume(500), value", touch="bytes")
OURS = _ours("penstock", "Penstock", "bare")
OURS_BYTES = _ours("penstock-bytes", "Penstock, bytes", "bare-bytes", handler="bytes")

_EVERY_SHAPE = (
    BARE,
    OURS,
    BARE_BYTES,
    OURS_BYTES,
    _bare("bare-json", "consume(500), JSON by msgspec", touch="order"),
    _ours("penstock-json", "Penstock, dataclass", "bare-json", handler="order"),
    _ours("penstock-retries", "Penstock, with retry=", "bare", retries=True),
    _ours("penstock-batch", "Penstock, batch=500", "bare-bytes", handler="batch", batch=500),
    _bare("bare-untouched", "consume(500), no loop over it", touch="nothing"),
    _bare("bare-untuned", "consume(500), library's settings", settings={}),
)


def _least(kind: Kind) -> Contest:
    shapes = _EVERY_SHAPE if kind == KINDS[0] else (BARE, OURS, BARE_BYTES, OURS_BYTES)
    return Contest(
        name=f"least-{kind.name}",
        title=f"At least once, {kind.title}",
        kind=kind,
        speed=FAST,
        contenders=shapes,
    )


def _stored(database: str) -> Contender:
    return _ours(
        f"penstock-{database}",
        f"Penstock, {_TITLES[database]}",
        "bare",
        delivery="effectively-once",
        databases={"store": database},
    )


def _shared(database: str, delivery: str, argument: str) -> Contender:
    return _ours(
        f"penstock-{database}",
        f"Penstock, {_TITLES[database]}",
        "bare",
        handler="connection",
        delivery=delivery,
        databases={argument: database},
    )


_TITLES = {"sqlite": "SQLite", "redis": "Redis", "postgres": "PostgreSQL"}
#: As our own publisher makes them.
_USUAL = KINDS[1]


def _contest(name: str, title: str, speed: str, *contenders: Contender) -> Contest:
    return Contest(name=name, title=title, kind=_USUAL, speed=speed, contenders=contenders)


_CONTRACTS = (
    _contest(
        "lanes",
        "At least once, several at a time",
        BATCHED,
        BARE_BYTES,
        _ours("penstock-threads", "Penstock, 4 threads", "bare-bytes", handler="bytes", concurrency=4),
        _ours("penstock-async", "Penstock, 4 coroutines", "bare-bytes", handler="coroutine", concurrency=4),
    ),
    _contest(
        "most",
        "At most once",
        BATCHED,
        _bare("bare-first", "consume(500), commit first", commits="first"),
        _ours("penstock", "Penstock", "bare-first", delivery="at-most-once"),
    ),
    _contest("effectively", "Effectively once, marks in", STORED, BARE, *map(_stored, _TITLES)),
    _contest(
        "effectively-connection",
        "Effectively once, mark and result in one transaction of",
        SINGLE,
        BARE,
        *(_shared(each, "effectively-once", "store") for each in ("sqlite", "postgres")),
    ),
    _contest(
        "exactly",
        "Exactly once, nothing published",
        BATCHED,
        _bare("bare-transactions", "consume(500), transactions", commits="transactions"),
        _ours("penstock", "Penstock", "bare-transactions", delivery="exactly-once"),
    ),
    _contest(
        "exactly-copy",
        "Exactly once, every message copied",
        BATCHED,
        _bare("bare-copies", "consume(500), produce", touch="nothing", commits="transactions", to=_COPIES),
        _ours("penstock", "Penstock", "bare-copies", handler="copy", delivery="exactly-once", to=_COPIES),
    ),
    _contest(
        "exactly-ledger",
        "Exactly once, result and position in one transaction of",
        SINGLE,
        BARE,
        *(_shared(each, "exactly-once", "ledger") for each in ("sqlite", "postgres")),
    ),
)


def _publishing(value_bytes: int) -> Contest:
    kind = Kind(value_bytes, False)
    return Contest(
        name=f"publish-{kind.name}",
        title=f"Publish {kind.title}",
        kind=kind,
        speed=PUBLISHED,
        contenders=(
            Contender(name="bare-produce", title="produce, on_delivery", asked={"publish": "bare"}),
            Contender(
                name="bare-headers", title="produce, with our headers", asked={"publish": "bare-headers"}
            ),
            Contender(
                name="penstock",
                title="Penstock, publish_soon",
                asked={"publish": "ours"},
                beside="bare-produce",
            ),
        ),
    )


#: Whether it runs: a contest of each sort.
SMOKE = ("least-100B-headers", "most", "effectively", "publish-100B")
CONTESTS = (*map(_least, KINDS), *_CONTRACTS, *map(_publishing, (100, 1024)))


# -- turns ---------------------------------------------------------------------------------------------


def turns_of(contest: Contest, stage: Stage) -> list[Turn]:
    take = _publish if contest.speed == PUBLISHED else _consume
    return [Turn(each.name, _turn(take, stage, contest, each)) for each in contest.contenders]


def _turn(
    take: Callable[[Stage, Contest, Contender], Round], stage: Stage, contest: Contest, who: Contender
) -> Callable[[], Round]:
    return lambda: take(stage, contest, who)


def messages_of(pace: Pace, contest: Contest, who: Contender) -> int:
    """A loop by hand is through with what a database has to do for long before anybody could look at the clock."""
    count = pace.count(contest.speed, contest.kind)
    return max(count, pace.count(BATCHED, contest.kind)) if who.is_bare and contest.speed == SINGLE else count


def _amounts(stage: Stage, contest: Contest, who: Contender) -> Asked:
    count = messages_of(stage.pace, contest, who)
    return {"messages": count, "warm": int(count * stage.pace.warm_part)}


def _consume(stage: Stage, contest: Contest, who: Contender) -> Round:
    """Raises TurnFailed where not all that was handled is committed, or what was to be copied is not there."""
    group, out = stage.new_group(), _out(stage, who)
    asked = {**_with_names(who, stage, out), **_amounts(stage, contest, who)}
    spent = stage.turn({**asked, "topic": stage.topic_of(contest.kind), "group": group})
    committed = stage.committed(group)
    if committed < asked["messages"]:
        raise TurnFailed(f"{who.name} has committed {committed} of {asked['messages']} messages")
    if out is not None:
        stage.drop_topic(out)
    return Round(rates(spent), None)


def _out(stage: Stage, who: Contender) -> str | None:
    names = {**who.asked, **who.asked.get("how", {})}
    return stage.new_topic(_COPIES) if names.get("to") == _COPIES else None


def _with_names(who: Contender, stage: Stage, out: str | None) -> Asked:
    """What is asked for, with the names and URLs of this turn."""
    asked = dict(who.asked)
    if "how" not in asked:
        return {**asked, "to": out}
    urls = {argument: stage.database(kind) for argument, kind in who.databases.items()}
    return {**asked, "how": {**asked["how"], **urls, **({"to": out} if out is not None else {})}}


def _publish(stage: Stage, contest: Contest, who: Contender) -> Round:
    topic = stage.new_topic("published")
    amounts = _amounts(stage, contest, who)
    spent = stage.turn({**who.asked, **amounts, "topic": topic, "value_bytes": contest.kind.value_bytes})
    stage.drop_topic(topic)
    return Round(rates(spent), None)
