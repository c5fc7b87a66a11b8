"""Judges a history in the manner of Jepsen's Kafka workload: what was acknowledged is there, once, in order, for all.

An acknowledgement and a delivery each say that an offset holds a value; together they are the log as the world knows
it. Timeouts and not-leader answers (info) are indefinite: such a value may be there or not, once. Values are unique.
A topic that is written with acks=1 promises less to its producers, and as much as any other to its consumers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.checks.history import UNKNOWN, Op

LOST = "lost write"  # acknowledged or delivered, others read past it, and it is not there
UNSEEN = "unseen"  # acknowledged, and no reader ever came so far
DUPLICATE = "duplicate"  # one value at two offsets
INCONSISTENT = "inconsistent offset"  # one offset with two values
POLL_BACK = "non-monotonic poll"  # a reader was given an offset again, or an earlier one
POLL_SKIP = "poll skip"  # a reader was not given an offset that others were given
SEND_ORDER = "non-monotonic send"  # a producer's values are in another order than it sent them
SEND_SKIP = "send skip"  # a later value is acknowledged, and an earlier one was never answered
UNEXPECTED = "unexpected"  # delivered, and never sent, or sent elsewhere, or certainly not written
COMMIT_BACK = "commit went backwards"  # a group was told an older offset than it had committed
LOST_OR_DOUBLED = (LOST, UNSEEN, DUPLICATE, INCONSISTENT, UNEXPECTED, COMMIT_BACK)
OUT_OF_ORDER = (POLL_BACK, POLL_SKIP, SEND_ORDER, SEND_SKIP)
ANOMALIES = (*LOST_OR_DOUBLED, *OUT_OF_ORDER)

FINAL = "final"  # readers of this name read all that there is when everything is over
EXAMPLES = 10


class Findings:
    """Anomalies by kind: how many, and the first few in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, words: str) -> None:
        self.counts[kind] += 1
        if len(self.examples[kind]) < EXAMPLES:
            self.examples[kind].append(words)


@dataclass(slots=True)
class Verdict:
    """`reported` are figures that are no anomalies."""

    operations: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.anomalies


class Sent:
    """A value that a producer sent. `index` counts the producer's values in that partition."""

    __slots__ = ("fate", "index", "partition", "process")

    def __init__(self, process: str, partition: int, index: int) -> None:
        self.process = process
        self.partition = partition
        self.index = index
        self.fate = ""  # "", ok, fail or info


class TopicJudge:
    """One topic. Everything is kept by partition: offset -> value."""

    def __init__(self, topic: str, *, is_strict: bool, findings: Findings, verdict: Verdict) -> None:
        self.topic = topic
        self.is_strict = is_strict
        self._findings = findings
        self._verdict = verdict
        self._sent: dict[int, Sent] = {}
        self._sends: Counter[tuple[str, int]] = Counter()
        self._acknowledged: dict[int, dict[int, int]] = defaultdict(dict)
        self._delivered: dict[int, dict[int, int]] = defaultdict(dict)
        self._somewhere: dict[int, list[int]] = defaultdict(
            list
        )  # acknowledged, at an offset that was not told
        self._final: dict[int, set[int]] = {}
        self._position: dict[tuple[str, int], int | None] = {}
        self._gaps: list[tuple[str, int, int, int]] = []

    def send(self, op: Op) -> None:
        if op.type == "invoke":
            for partition, value in op.values:
                self._sends[op.process, partition] += 1
                self._sent[value] = Sent(op.process, partition, self._sends[op.process, partition])
            return
        self._verdict.operations[f"sends {op.type}"] += len(op.values)
        for item in op.values:
            self._sent[item[-1]].fate = op.type
            if op.type == "ok" and self.is_strict:
                partition, offset, value = item
                if offset == UNKNOWN:
                    self._somewhere[partition].append(value)
                    continue
                self._note(self._acknowledged[partition], partition, offset, value, "acknowledged")

    def seek(self, op: Op) -> None:
        """The reader goes on from there; -1 is a place that it does not know."""
        for partition, offset in op.values:
            self._position[op.process, partition] = offset if offset >= 0 else None
            if op.process.startswith(FINAL):
                self._final.setdefault(partition, set())

    def poll(self, op: Op) -> None:
        self._verdict.operations["deliveries"] += len(op.values)
        for partition, offset, value in op.values:
            expected = self._position.get((op.process, partition))
            if expected is not None and offset != expected:
                self._jumped(op.process, partition, expected, offset)
            self._position[op.process, partition] = offset + 1
            if op.process.startswith(FINAL):
                self._final.setdefault(partition, set()).add(offset)
            self._note(self._delivered[partition], partition, offset, value, f"delivered to {op.process}")

    def _note(self, known: dict[int, int], partition: int, offset: int, value: int, how: str) -> None:
        if known.setdefault(offset, value) != value:
            words = f"{self._place(partition, offset)} is {known[offset]}, then {value} {how}"
            self._findings.add(INCONSISTENT, words)

    def _jumped(self, reader: str, partition: int, expected: int, offset: int) -> None:
        if offset < expected:
            self._findings.add(
                POLL_BACK, f"{reader} was at {self._place(partition, expected)} and got {offset}"
            )
        else:
            self._gaps.append((reader, partition, expected, offset))

    def _place(self, partition: int, offset: int) -> str:
        return f"{self.topic}-{partition} offset {offset}"

    def judge(self) -> None:
        for partition in sorted(self._acknowledged.keys() | self._delivered.keys()):
            acknowledged, delivered = self._acknowledged[partition], self._delivered[partition]
            self._judge_promises(partition, acknowledged, delivered)
            log = {**acknowledged, **delivered}
            self._judge_log(partition, log)
            self._judge_last_reading(partition, log)
        self._judge_gaps()
        self._judge_unreported()
        if not self.is_strict:
            self._count_broken_promises()

    def _judge_promises(
        self, partition: int, acknowledged: dict[int, int], delivered: dict[int, int]
    ) -> None:
        end = max(delivered, default=-1)
        values = set(delivered.values())
        for offset, value in acknowledged.items():
            found = delivered.get(offset)
            if found is not None and found != value:
                words = f"{self._place(partition, offset)} was acknowledged for {value} and holds {found}"
                self._findings.add(INCONSISTENT, words)
            if value not in values:
                kind = LOST if offset <= end else UNSEEN
                self._findings.add(kind, f"{value}, acknowledged at {self._place(partition, offset)}")
        for value in self._somewhere[partition]:
            self._verdict.reported["acknowledged without an offset"] += 1
            if value not in values:
                self._findings.add(LOST, f"{value}, acknowledged somewhere in {self.topic}-{partition}")

    def _count_broken_promises(self) -> None:
        """What acks=1 has acknowledged may be lost with its leader, and its offset given to another."""
        found = Counter(value for log in self._delivered.values() for value in log.values())
        acknowledged = [value for value, sent in self._sent.items() if sent.fate == "ok"]
        self._verdict.reported["acks=1 acknowledged"] += len(acknowledged)
        self._verdict.reported["acks=1 lost"] += sum(value not in found for value in acknowledged)
        self._verdict.reported["acks=1 duplicated"] += sum(count - 1 for count in found.values())

    def _judge_log(self, partition: int, log: dict[int, int]) -> None:
        places: dict[int, int] = {}
        newest: dict[str, int] = {}
        for offset in sorted(log):
            value = log[offset]
            sent = self._sent.get(value)
            if sent is None or sent.partition != partition or sent.fate == "fail":
                why = (
                    "was never sent" if sent is None else f"went to partition {sent.partition} ({sent.fate})"
                )
                self._findings.add(UNEXPECTED, f"{value} at {self._place(partition, offset)} {why}")
            elif self.is_strict and value in places:
                self._findings.add(
                    DUPLICATE, f"{value} at {self._place(partition, offset)} and {places[value]}"
                )
            elif self.is_strict and sent.index < newest.get(sent.process, 0):
                self._findings.add(
                    SEND_ORDER, f"{value} of {sent.process} at {self._place(partition, offset)}"
                )
            places[value] = offset
            if sent is not None:
                newest[sent.process] = max(newest.get(sent.process, 0), sent.index)

    def _judge_last_reading(self, partition: int, log: dict[int, int]) -> None:
        """What anyone was ever told of is still there when everything is over."""
        if partition not in self._final:
            return
        self._verdict.operations["read at the end"] += len(self._final[partition])
        seen = self._delivered[partition]
        for offset in log.keys() - self._final[partition]:
            if offset in seen:
                words = (
                    f"{self._place(partition, offset)} was delivered ({seen[offset]}) and is gone at the end"
                )
                self._findings.add(LOST, words)

    def _judge_gaps(self) -> None:
        for reader, partition, expected, offset in self._gaps:
            delivered = self._delivered[partition]
            if skipped := [missing for missing in range(expected, offset) if missing in delivered]:
                words = (
                    f"{reader} went from {self._place(partition, expected)} to {offset} past {skipped[:5]}"
                )
                self._findings.add(POLL_SKIP, words)

    def _judge_unreported(self) -> None:
        newest: dict[tuple[str, int], int] = defaultdict(int)
        for sent in self._sent.values():
            if sent.fate == "ok":
                at = (sent.process, sent.partition)
                newest[at] = max(newest[at], sent.index)
        for value, sent in self._sent.items():
            if sent.fate in ("", "info"):
                self._verdict.operations["sends of unknown outcome"] += 1
            if self.is_strict and not sent.fate and sent.index < newest[sent.process, sent.partition]:
                self._findings.add(
                    SEND_SKIP, f"{value} of {sent.process} was never answered, a later one was"
                )


class GroupJudge:
    """Commits of a group, by partition: what was acknowledged is a floor for whatever it is told later.

    A commit whose answer was lost may still be on its way, and take effect after a later one of the same member: the
    protocol has nothing against that.
    """

    def __init__(self, findings: Findings, verdict: Verdict) -> None:
        self._findings = findings
        self._verdict = verdict
        self._floor: dict[tuple[str, int], int] = {}
        self._asked: dict[str, dict[tuple[str, int], int]] = {}  # floors when each process asked
        self._unsure: set[tuple[str, int, int]] = set()

    def commit(self, op: Op) -> None:
        self._verdict.operations[f"commits {op.type}"] += len(op.values)
        if op.type == "ok":
            for partition, offset in op.values:
                at = (op.topic, partition)
                self._floor[at] = max(offset, self._floor.get(at, offset))
        elif op.type == "info":
            self._unsure |= {(op.topic, *place) for place in op.values}

    def committed(self, op: Op) -> None:
        if op.type == "invoke":
            self._asked[op.process] = dict(self._floor)
        elif op.type == "ok":
            floors = self._asked.pop(op.process, {})
            for partition, offset in op.values:
                floor = floors.get((op.topic, partition), -1)
                if offset < floor and (op.topic, partition, offset) in self._unsure:
                    self._verdict.reported["commits that came late"] += 1
                elif offset < floor:
                    words = f"{op.process} was told {offset} for {op.topic}-{partition} after {floor} was committed"
                    self._findings.add(COMMIT_BACK, words)


def check(history: Iterable[Op], *, weak_topics: Iterable[str] = ()) -> Verdict:
    """`weak_topics` are written with acks=1."""
    verdict, findings, weak = Verdict(), Findings(), set(weak_topics)
    topics: dict[str, TopicJudge] = {}
    groups = GroupJudge(findings, verdict)
    for op in history:
        if op.f in ("commit", "committed"):
            getattr(groups, op.f)(op)
        elif op.f in ("send", "poll", "seek"):
            if op.topic not in topics:
                strict = op.topic not in weak
                topics[op.topic] = TopicJudge(op.topic, is_strict=strict, findings=findings, verdict=verdict)
            getattr(topics[op.topic], op.f)(op)
    for judge in topics.values():
        judge.judge()
    verdict.anomalies, verdict.examples = dict(findings.counts), dict(findings.examples)
    return verdict
