"""`penstock dlq edit`, `purge` and `replay`: they show what they are going to do, ask for confirmation, and print the
outcome.

`edit` takes the corrected value from an option or from the user's own editor. `replay` shows its progress on
stderr: a bar in a terminal, a line now and then in logs.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.cli.errors import EXIT_FAILURE, EXIT_USAGE, CommandError
from penstock.cli.options import parse_pairs
from penstock.cli.os_process import stop_on_first_signal
from penstock.cli.output import confirm, note, plural, print_json, print_table
from penstock.client.deadletters.dead_letter import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterId,
    ResolutionState,
)
from penstock.client.deadletters.edit import UNCHANGED, DeadLetterEdit, apply_edit, edit, find_unresolved
from penstock.client.deadletters.purge import PurgeOutcome, PurgePlan, plan_purge, purge, purge_all
from penstock.client.deadletters.replay import Replay, ReplayOutcome, ReplayPlan, ReplayRequest, plan_replay
from penstock.client.deadletters.topics import DeadLetterError, is_dead_letter_topic
from penstock.client.deadletters.writer import ReplayDestination, ReplayLock, ReplayTarget
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo

_COMPACT, _SPACED = (",", ":"), (", ", ": ")


def _replay_lock(cluster: Cluster, topic: TopicInfo) -> ReplayLock:
    """The lock that replays on Spark take, too. Importing it does not load Spark itself."""
    from penstock.spark.replay.lock import SparkReplayLock  # loads much that `list` and `show` do not need

    return SparkReplayLock(cluster, topic.name)


def _new_replay_id() -> str:
    """The id under which `dlq list` shows what this command did."""
    return f"dlq-{uuid.uuid4().hex[:12]}"


def edit_dead_letter(
    cluster: Cluster,
    topic: TopicInfo,
    dead_letter_id: DeadLetterId,
    *,
    value: str | None,
    key: str | None,
    headers: Sequence[str] | None,
    editor: bool,
) -> DeadLetterId | None:
    """Returns the id of the corrected dead letter; None if the broker does not report its offset."""
    letter = find_unresolved(cluster, topic, dead_letter_id)
    change = DeadLetterEdit(
        key=UNCHANGED if key is None else key.encode(),
        value=UNCHANGED if value is None else _read_value(value),
        headers=tuple((name, text.encode()) for name, text in parse_pairs(headers or (), "--header").items()),
    )
    if editor or change.is_none:
        if not editor and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise CommandError(
                "an editor needs a terminal",
                exit_code=EXIT_USAGE,
                hint="give the corrected value with --value TEXT, --value @FILE or --value -, or add --editor",
            )
        change = DeadLetterEdit(key=change.key, value=_edit_value(letter), headers=change.headers)
    now_ms = int(time.time() * 1000)
    apply_edit(letter, change, now_ms)  # reports an invalid change before we take the replay lock
    return edit(
        cluster, topic, letter, change, _replay_lock(cluster, topic), id=_new_replay_id(), now_ms=now_ms
    )


def _read_value(text: str) -> bytes:
    """The text itself, or the content of a file or of standard input."""
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        return text.encode()
    try:
        with open(text[1:], "rb") as file:
            return file.read()
    except OSError as error:
        raise CommandError(
            f"--value: {text[1:]} cannot be read: {error.strerror}", exit_code=EXIT_USAGE
        ) from None


# The editor


def _edit_value(letter: DeadLetter) -> bytes:
    try:
        text = (letter.record.value or b"").decode()
    except UnicodeDecodeError:
        raise CommandError(
            f"the value of {letter.dead_letter_id} is not text", hint="give the new value with --value @FILE"
        ) from None
    separators = json_separators(text)
    shown = text if separators is None else json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    changed = _run_editor(shown, ".json" if separators is not None else ".txt")
    if not text.endswith("\n"):
        changed = changed.removesuffix("\n")  # many editors add one
    if separators is None:
        return changed.encode()
    try:
        return json.dumps(json.loads(changed), ensure_ascii=False, separators=separators).encode()
    except ValueError as error:
        raise CommandError(
            f"the value was JSON and no longer is: {error}", hint="--value accepts any value"
        ) from None


def json_separators(text: str) -> tuple[str, str] | None:
    """The separators that JSON on one line is written with; None if writing it again would change it."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    for separators in (_COMPACT, _SPACED):
        if json.dumps(document, ensure_ascii=False, separators=separators) == text:
            return separators
    return None


def _run_editor(text: str, suffix: str) -> str:
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = os.path.join(folder, f"value{suffix}")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        try:
            code = subprocess.run([*shlex.split(command), path], check=False).returncode
        except OSError as error:
            raise CommandError(
                f"the editor {command} cannot be started: {error.strerror}",
                hint="set EDITOR, or give --value",
            ) from None
        if code:
            raise CommandError(f"the editor ended with code {code}: nothing was changed")
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()


def purge_dead_letters(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: DeadLetterFilter,
    *,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    if everything:
        _check_purge_all(topic, wanted)
    # Without a filter no dead letter is marked as purged; only resolved ones are deleted.
    chosen = DeadLetterFilter() if everything else None if wanted.is_empty else wanted
    found = plan_purge(cluster, topic, chosen)
    if dry_run:
        _print_purge_plan(topic, found, as_json=as_json)
        return
    done = PurgeOutcome()
    if not found.is_nothing:
        confirm(_purge_question(topic, found), yes=yes)
        done = (
            purge_all(cluster, topic)
            if everything
            else purge(cluster, topic, chosen, _replay_lock(cluster, topic), id=_new_replay_id())
        )
    _print_purge_outcome(topic, found, done, everything=everything, as_json=as_json)


def _check_purge_all(topic: TopicInfo, wanted: DeadLetterFilter) -> None:
    if not wanted.is_empty:
        raise CommandError("--all cannot be combined with filters", exit_code=EXIT_USAGE)
    if not is_dead_letter_topic(topic.name):
        raise CommandError(
            f"{topic.name} may hold other records, too",
            hint="--all is only for topics whose names end in .dlq",
            exit_code=EXIT_USAGE,
        )


def _purge_question(topic: TopicInfo, found: PurgePlan) -> str:
    parts = []
    if found.chosen:
        parts.append(f"mark {plural(found.chosen, 'dead letter')} that were not replayed as purged")
    if found.deletable:
        parts.append(f"delete {plural(found.deletable, 'dead letter')}")
    return f"{topic.name}: {', and '.join(parts)}?"


def _print_purge_plan(topic: TopicInfo, found: PurgePlan, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": topic.name,
                "dry_run": True,
                "would_give_up": found.chosen,
                "would_delete": found.deletable,
                "still_waiting": found.kept,
            }
        )
        return
    note(
        f"{plural(found.chosen, 'dead letter')} would be marked as purged, {found.deletable} deleted; "
        f"{found.kept} would still wait"
    )


def _print_purge_outcome(
    topic: TopicInfo, found: PurgePlan, done: PurgeOutcome, *, everything: bool, as_json: bool
) -> None:
    given_up = found.chosen if everything else done.given_up
    if as_json:
        print_json(
            {
                "topic": topic.name,
                "given_up": given_up,
                "deleted": done.deleted,
                "still_waiting": found.kept,
                "beginnings": {str(index): offset for index, offset in done.beginnings.items()},
            }
        )
        return
    note(f"{topic.name}: {plural(given_up, 'dead letter')} marked as purged, {done.deleted} deleted")
    if found.kept:
        note(
            f"{plural(found.kept, 'dead letter')} still wait; resolved ones after the first of them stay until it "
            "is resolved"
        )


LINE_EVERY_S = 5.0


@contextmanager
def show_progress(total: int, noun: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of items done so far."""
    if not sys.stderr.isatty():
        yield _progress_lines(total, noun)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn(noun),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    )
    with bar:
        task = bar.add_task(noun, total=total)
        yield lambda done: bar.update(task, completed=done)


def _progress_lines(total: int, noun: str) -> Callable[[int], None]:
    last_s = time.monotonic()

    def report(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            note(f"{done} of {total} {noun}")

    return report


def parse_destination(to: str, *, keeps_times: bool) -> ReplayDestination:
    if to in (ReplayTarget.ORIGINAL.value, ReplayTarget.GROUP.value):
        return ReplayDestination(target=ReplayTarget(to), keeps_times=keeps_times)
    return ReplayDestination(target=ReplayTarget.TOPIC, topic=to, keeps_times=keeps_times)


def replay_dead_letters(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: DeadLetterFilter,
    destination: ReplayDestination,
    *,
    rate_per_s: float | None,
    limit: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Returns the exit code."""
    request = ReplayRequest(
        topic=topic,
        id=_new_replay_id(),
        wanted=wanted,
        destination=destination,
        rate_per_s=rate_per_s,
        limit=limit,
    )
    found = _checked_plan(cluster, request)
    if dry_run:
        _print_replay_plan(request, found, as_json=as_json)
        return 0
    outcome = ReplayOutcome()
    if found.total:
        outcome = _run_replay(cluster, request, found)
    _print_replay_outcome(request, found, outcome, as_json=as_json)
    return EXIT_FAILURE if outcome.refused or outcome.is_stopped else 0


def _checked_plan(cluster: Cluster, request: ReplayRequest) -> ReplayPlan:
    try:
        found = plan_replay(cluster, request)
    except DeadLetterError as error:
        is_named = request.destination.topic is not None
        raise CommandError(
            str(error), hint=None if is_named else _TARGET_HINTS[request.destination.target]
        ) from None
    for text in found.notes:
        note(text)
    return found


_TARGET_HINTS = {
    ReplayTarget.ORIGINAL: "--to TOPIC sends all of them to one topic; --error, --group and other filters select some",
    ReplayTarget.GROUP: "--to original publishes them for all groups; --group selects those of some groups",
}


def _run_replay(cluster: Cluster, request: ReplayRequest, found: ReplayPlan) -> ReplayOutcome:
    with stop_on_first_signal() as stopping, show_progress(found.total, "dead letters") as progress:
        replay = Replay(cluster, request, found, progress=progress, should_stop=stopping.is_set)
        try:
            return replay.run(_replay_lock(cluster, request.topic))
        except ClientError as error:
            done = f"{plural(replay.outcome.replayed, 'dead letter')} replayed"
            raise CommandError(
                f"{error} ({done})", hint="run it again to continue; it replays each dead letter once"
            ) from None


# Output


def _print_replay_plan(request: ReplayRequest, found: ReplayPlan, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "topic": request.topic.name,
                "dry_run": True,
                "would_replay": found.total,
                "to": [
                    {"topic": route.topic, "group": route.group, "letters": count}
                    for route, count in sorted(found.routes.items())
                ],
                **_skipped_document(found),
            }
        )
        return
    if found.routes:
        rows = ([route.topic, route.group, count] for route, count in sorted(found.routes.items()))
        print_table(["to", "for group", "dead letters"], rows)
    note(f"{plural(found.total, 'dead letter')} would be replayed")
    _print_skipped(found)


def _print_replay_outcome(
    request: ReplayRequest, found: ReplayPlan, outcome: ReplayOutcome, *, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "topic": request.topic.name,
                "replay": request.id,
                "replayed": outcome.replayed,
                "refused": outcome.refused,
                "stopped": outcome.is_stopped,
                **_skipped_document(found),
            }
        )
    else:
        note(f"{plural(outcome.replayed, 'dead letter')} of {request.topic.name} replayed")
        _print_skipped(found)
        resolved_meanwhile = outcome.done_before - found.done.total()
        if resolved_meanwhile > 0:
            note(
                f"{plural(resolved_meanwhile, 'dead letter')} skipped: another command resolved them meanwhile"
            )
    for refusal in outcome.refusals:
        note(f"{refusal.entry.letter.dead_letter_id} was refused, and still waits: {refusal.reason}")
    if outcome.refused > len(outcome.refusals):
        note(f"{outcome.refused - len(outcome.refusals)} more were refused")
    if outcome.is_stopped:
        note("stopped; run it again to continue")


def _skipped_document(found: ReplayPlan) -> dict[str, Any]:
    return {
        "done_before": found.done.total(),
        "done": {state.value: found.done[state] for state in ResolutionState},
        "left_out": {each.name.lower(): count for each, count in found.left.items()},
    }


def _print_skipped(found: ReplayPlan) -> None:
    if found.done:
        states = ", ".join(f"{count} {state.value}" for state, count in sorted(found.done.items()))
        note(f"{plural(found.done.total(), 'dead letter')} skipped, resolved before: {states}")
    for reason, count in found.left.items():
        note(f"{plural(count, 'dead letter')} skipped: they {reason.value}")
