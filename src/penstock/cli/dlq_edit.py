"""`penstock dlq edit`: where the corrected value is from, and the user's own editor for it."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from penstock.cli.dlq_topics import new_id, turn_of
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import pairs
from penstock.client.cluster import Cluster
from penstock.client.deadletters.editing import UNCHANGED, Change, edit, edited, find_waiting
from penstock.client.deadletters.letter import Letter, Spot
from penstock.client.metadata import TopicInfo

_COMPACT, _SPACED = (",", ":"), (", ", ": ")


def edit_letter(
    cluster: Cluster,
    topic: TopicInfo,
    spot: Spot,
    *,
    value: str | None,
    key: str | None,
    headers: Sequence[str] | None,
    editor: bool,
) -> Spot | None:
    """Where the corrected letter is; None where the broker does not tell."""
    letter = find_waiting(cluster, topic, spot)
    change = Change(
        key=UNCHANGED if key is None else key.encode(),
        value=UNCHANGED if value is None else _given(value),
        headers=tuple((name, text.encode()) for name, text in pairs(headers or (), "--header").items()),
    )
    if editor or change.is_none:
        if not editor and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise Failure(
                "there is no terminal for an editor",
                exit_code=WRONG_USAGE,
                hint="give the corrected value with --value TEXT, --value @FILE or --value -, or say --editor",
            )
        change = Change(key=change.key, value=_from_editor(letter), headers=change.headers)
    now_ms = int(time.time() * 1000)
    edited(letter, change, now_ms)  # what is wrong with it is told before anybody's turn is taken
    return edit(cluster, topic, letter, change, turn_of(cluster, topic), id=new_id(), now_ms=now_ms)


def _given(text: str) -> bytes:
    """Text, or what is in a file or on standard input."""
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        return text.encode()
    try:
        with open(text[1:], "rb") as file:
            return file.read()
    except OSError as error:
        raise Failure(
            f"--value: {text[1:]} cannot be read: {error.strerror}", exit_code=WRONG_USAGE
        ) from None


# The editor


def _from_editor(letter: Letter) -> bytes:
    try:
        text = (letter.record.value or b"").decode()
    except UnicodeDecodeError:
        raise Failure(
            f"the value of {letter.spot} is no text", hint="give another with --value @FILE"
        ) from None
    separators = json_style(text)
    shown = text if separators is None else json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    changed = _edited(shown, ".json" if separators is not None else ".txt")
    if not text.endswith("\n"):
        changed = changed.removesuffix("\n")  # which editors add of their own accord
    if separators is None:
        return changed.encode()
    try:
        return json.dumps(json.loads(changed), ensure_ascii=False, separators=separators).encode()
    except ValueError as error:
        raise Failure(
            f"the value was JSON and is none any more: {error}", hint="--value publishes whatever it is given"
        ) from None


def json_style(text: str) -> tuple[str, str] | None:
    """How JSON on one line is written; None for what would not come out the same again."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    for separators in (_COMPACT, _SPACED):
        if json.dumps(document, ensure_ascii=False, separators=separators) == text:
            return separators
    return None


def _edited(text: str, suffix: str) -> str:
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = os.path.join(folder, f"letter{suffix}")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        try:
            code = subprocess.run([*shlex.split(command), path], check=False).returncode
        except OSError as error:
            raise Failure(
                f"the editor {command} cannot be started: {error.strerror}",
                hint="set EDITOR, or give --value",
            ) from None
        if code:
            raise Failure(f"the editor ended with code {code}: nothing was changed")
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
