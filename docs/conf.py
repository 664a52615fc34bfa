"""The docs site: `make docs` builds it from the Markdown files beside this one, and fails at any warning."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import trainshort

ROOT = Path(__file__).resolve().parent.parent

project = "trainshort"
release = trainshort.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
nitpicky = True
default_role = "code"
myst_heading_anchors = 4
autodoc_typehints = "none"  # signatures would be all types: Args says what each argument is
add_module_names = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "trainshort"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6fb2", "color-brand-content": "#1f6fb2"},
    "dark_css_variables": {"color-brand-primary": "#5aa9e6", "color-brand-content": "#5aa9e6"},
}


def link_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Links to files of the repository, which Sphinx would offer for download, lead to pages that show them."""
    links = [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]
    for node in links:
        target = node["reftarget"] + (".md" if node.get("refdomain") == "doc" else "")
        path = posixpath.relpath(posixpath.join(app.srcdir, target), ROOT)
        if not path.startswith("docs/") and (ROOT / path).is_file():
            app.env.trainshort_sources = {*getattr(app.env, "trainshort_sources", ()), path}  # type: ignore[attr-defined]
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"source/{path}.html", internal=True))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    highlighter = app.builder.highlighter  # type: ignore[attr-defined]
    for path in sorted(getattr(app.env, "trainshort_sources", ())):
        language = "python" if path.endswith(".py") else "markdown"
        shown = highlighter.highlight_block((ROOT / path).read_text(), language)
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{shown}", "parents": []}, "page.html"


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", link_sources, priority=100)  # before Sphinx collects downloads
    app.connect("html-collect-pages", source_pages)
