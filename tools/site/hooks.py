"""Hooks of mkdocs: adds the generated pages, draws diagrams, and refuses pages that load anything from other hosts."""

import logging
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from tools.site import diagrams, reference, repository

#: A warning fails a strict build.
logger = logging.getLogger("mkdocs.hooks.site")

_CACHE = repository.ROOT / "build" / "diagrams"
_LOADED = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: `decisions/` becomes its pages, and pages that it does not name come last."""
    nav = [_expanded(item) for item in config.nav or []]
    named = set(_leaves(nav))
    docs = repository.ROOT / repository.DOCS
    others = sorted(str(each.relative_to(docs)) for each in docs.rglob("*.md"))
    others = [each for each in others if each not in named]
    config.nav = [*nav, {"More": others}] if others else nav
    return config


def _expanded(item: Any) -> Any:
    match item:
        case dict():
            return {title: _expanded(value) for title, value in item.items()}
        case list():
            return [_expanded(each) for each in item]
        case str() if item.endswith("/"):
            folder = repository.ROOT / repository.DOCS / item
            return [f"{item}index.md", *(f"{item}{each.name}" for each in sorted(folder.glob("[0-9]*.md")))]
    return item


def _leaves(item: Any) -> Iterator[str]:
    match item:
        case dict():
            yield from _leaves(list(item.values()))
        case list():
            for each in item:
                yield from _leaves(each)
        case str():
            yield item


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    first = {repository.repository_path(each.src_uri) for each in files.documentation_pages()}
    first -= {f"{repository.DOCS}/{path}" for path in reference.pages()}
    named = {repository.HOME, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/decisions", "examples"}
    for path, page in repository.extra_pages(first | named).items():
        if isinstance(page, str):
            files.append(File.generated(config, path, content=page))
        else:
            files.append(File.generated(config, path, abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def add_image(name: str, svg: str) -> str:
        path = f"diagrams/{name}"
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, content=svg))
        return posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")

    if not page.file.src_uri.startswith("reference/"):
        markdown = repository.with_site_links(markdown, repository.repository_path(page.file.src_uri))
    try:
        return diagrams.with_images(markdown, add_image, _CACHE)
    except RuntimeError as error:
        logger.warning("%s: %s", page.file.src_uri, "\n".join(str(error).splitlines()[:3]))
        return markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for address in _LOADED.findall(output):
        logger.warning("%s loads %s from another host", page.file.src_uri, address)
    return output
