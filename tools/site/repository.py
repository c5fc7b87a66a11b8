"""Links between pages and the rest of the repository.

Pages link to files outside docs/, such as examples, with paths that also work in a checkout. On the site each such file
is a page of its own, and `README.md` is the home page.
"""

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = "docs"
HOME = "README.md"
#: Where the site has files from outside docs/.
PREFIX = "repository"
#: Files that the site serves as they are.
ASSETS = (".csv", ".json", ".png", ".svg")

_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#\s])")


def site_path(path: str) -> str:
    """Return where the site has a file or directory of the repository, as a source path of mkdocs."""
    if path == HOME:
        return "index.md"
    inside = path == DOCS or path.startswith(f"{DOCS}/")
    place = posixpath.relpath(path, DOCS) if inside else f"{PREFIX}/{path}"
    if (ROOT / path).is_dir():
        return f"{place}/index.md"
    return place if inside or path.endswith((".md", *ASSETS)) else f"{place}.md"


def repository_path(site: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    if site == "index.md":
        return HOME
    if not site.startswith(f"{PREFIX}/"):
        return f"{DOCS}/{site}"
    path = site.removeprefix(f"{PREFIX}/")
    for candidate in (path, path.removesuffix(".md"), path.removesuffix("/index.md")):
        if (ROOT / candidate).exists():
            return candidate
    raise ValueError(f"{site} is not made from a file of the repository")


def linked_paths(markdown: str, source: str) -> set[str]:
    """Return the files and directories of the repository that a page links to."""
    found = set()

    def note(path: str) -> None:
        found.add(path)

    _map_links(markdown, source, note)
    return found


def with_site_links(markdown: str, source: str) -> str:
    """Return the page with links that are right on the site. A link to a missing file stays as it is."""
    start = posixpath.dirname(site_path(source))
    return _map_links(markdown, source, lambda path: posixpath.relpath(site_path(path), start or "."))


def _map_links(markdown: str, source: str, change: Callable[[str], str | None]) -> str:
    def replace(link: re.Match[str]) -> str:
        if ":" in link[0]:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        return (change(path) if (ROOT / path).exists() else None) or link[0]

    parts = _FENCE.split(markdown)  # every second part is a fenced block
    return "".join(part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts))


def extra_pages(first: Iterable[str]) -> dict[str, str | Path]:
    """Return the pages for files outside docs/ that these pages link to, directly or through each other.

    The keys are source paths of mkdocs. A value is Markdown, or the file that the site serves as it is.
    """
    pages: dict[str, str | Path] = {}
    seen: set[str] = set()
    waiting = set(first)
    while waiting:
        path = waiting.pop()
        seen.add(path)
        if site_path(path) != posixpath.relpath(path, DOCS):
            pages[site_path(path)] = _page(path)
        if (ROOT / path).is_dir():
            waiting |= set(_entries(path)) - seen
        elif path.endswith(".md"):
            waiting |= linked_paths((ROOT / path).read_text(), path) - seen
    return pages


def _page(path: str) -> str | Path:
    file = ROOT / path
    if file.is_dir():
        start = posixpath.dirname(site_path(path))
        links = [(_title(entry), posixpath.relpath(site_path(entry), start)) for entry in _entries(path)]
        return "\n".join(
            (f"# {file.name.capitalize()}\n", *(f"- [{title}]({link})" for title, link in links), "")
        )
    if path.endswith(".md"):
        return file.read_text()
    if path.endswith(ASSETS):
        return file
    return f"# {path}\n\n```{file.suffix.removeprefix('.')}\n{file.read_text()}```\n"


def _entries(directory: str) -> list[str]:
    """Return the Markdown and Python files of a directory and those below it."""
    files = (ROOT / directory).rglob("*")
    return sorted(str(each.relative_to(ROOT)) for each in files if each.suffix in (".md", ".py"))


def _title(path: str) -> str:
    heading = (
        re.search(r"^# (.+)$", (ROOT / path).read_text(), re.MULTILINE) if path.endswith(".md") else None
    )
    return heading[1] if heading else path
