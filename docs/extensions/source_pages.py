"""Pages that show the files of the repository which the docs link to."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent.parent


def link_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Files outside of docs/ would be offered for download, or missed: link to their pages instead."""
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        target = node["reftarget"] + (".md" if node.get("refdomain") == "doc" else "")
        path = posixpath.relpath(posixpath.join(app.srcdir, target), ROOT)
        if not path.startswith("docs/") and (ROOT / path).is_file():
            sources(app).add(path)
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"source/{path}.html", internal=True))


def sources(app: Sphinx) -> set[str]:
    """The paths of linked files, kept between builds."""
    if not hasattr(app.env, "linked_sources"):
        app.env.linked_sources = set()
    found: set[str] = app.env.linked_sources
    return found


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(sources(app)):
        language = "python" if path.endswith(".py") else "markdown"
        shown = app.builder.highlighter.highlight_block((ROOT / path).read_text(), language)
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{shown}", "parents": []}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link_sources, priority=100)  # before Sphinx collects downloads
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": False}
