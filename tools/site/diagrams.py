"""Mermaid diagrams as SVG files, drawn while the site is built: readers load no script, and a wrong diagram fails."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WIDTH = re.compile(r'viewBox="\S+ \S+ (\S+) ')


def with_images(markdown: str, add_image: Callable[[str, str], str], cache: Path) -> str:
    """Replace each diagram with an image. `add_image(name, svg)` adds a file to the site and returns its link.

    Raises RuntimeError for a diagram that Mermaid cannot draw.
    """

    def image(fence: re.Match[str]) -> str:
        svg = _drawn(fence[1], cache)
        width = _WIDTH.search(svg)
        link = add_image(f"{_digest(fence[1])}.svg", svg)
        kind = "Sequence diagram" if fence[1].startswith("sequenceDiagram") else "Diagram"
        return f"![{kind}]({link}){{ .diagram width={round(float(width[1])) if width else 800} }}"

    return FENCE.sub(image, markdown)


def _drawn(source: str, cache: Path) -> str:
    """Return the diagram as SVG. Drawing takes seconds, so drawn diagrams are kept in `cache`."""
    kept = cache / f"{_digest(source)}.svg"
    if kept.exists():
        return kept.read_text()
    import mermaidx  # only the docs extra has it

    svg: str = mermaidx.render(source).svg()
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(svg)
    return svg


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]
