"""Secrets that tests plant, and the search for them in everything that a run has written or shown."""

import base64
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

#: Shorter texts occur by chance.
_LENGTH_MIN = 16


class PlantedSecrets:
    """Unique texts by purpose. `check` looks for each of them as it is, in base 64 and in hexadecimal."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def new(self, purpose: str) -> str:
        """Make a secret: letters, digits and underscores, which no quoting changes."""
        return self.add(purpose, f"planted_{purpose}_{secrets.token_hex(8)}")

    def add(self, purpose: str, secret: str) -> str:
        """Look for a secret that something else has made."""
        assert len(secret) >= _LENGTH_MIN, secret
        with self._lock:
            self._known[purpose] = secret
        return secret

    def add_key(self, purpose: str, pem: Path) -> None:
        """Look for a line from the middle of a private key."""
        lines = pem.read_text().splitlines()
        begin = next(number for number, line in enumerate(lines) if "PRIVATE KEY" in line)
        self.add(purpose, lines[begin + 2])

    def found_in(self, text: str | bytes) -> set[str]:
        """Return the purposes of the secrets in a text."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        with self._lock:
            known = dict(self._known)
        return {purpose for purpose, secret in known.items() if any(form in data for form in _forms(secret))}

    def check(self, text: str | bytes, where: str) -> None:
        found = self.found_in(text)
        assert not found, f"{where} shows {sorted(found)}"

    def check_files(self, folder: Path, *, but: frozenset[str] = frozenset()) -> None:
        """Check all files in a folder except those with these names."""
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in but:
                self.check(path.read_bytes(), str(path))


def command_lines() -> bytes:
    """Return the arguments of all processes of this machine, as any user can see them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # the process has ended
            continue
    return b"\n".join(found)


def _forms(secret: str) -> Iterator[bytes]:
    data = secret.encode()
    yield data
    yield data.hex().encode()
    for lead in range(3):  # where in a group of three bytes it begins
        encoded = base64.b64encode(b"\0" * lead + data)
        yield encoded[(0, 2, 3)[lead] : len(encoded) // 4 * 4 - 4]
