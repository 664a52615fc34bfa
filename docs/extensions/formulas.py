"""Formulas that are plain text in Markdown, such as e^{−m·d} and k_j, with real exponents and indices on the site.

On the pages named in `formula_pages`: in their sentences, and in indented blocks, which hold formulas there.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

MARK = re.compile(r"(?<=\S)([_^])(?=[\w{(−])")
SHORT = re.compile(r"−?\w+")
CLOSING = {"{": "}", "(": ")"}


def typeset(text: str) -> list[nodes.Node]:
    """The same text, with raised and lowered parts."""
    found: list[nodes.Node] = []
    while mark := MARK.search(text):
        end = _group_end(text, mark.end())
        inside = text[mark.end() : end]
        inside = inside[1:-1] if inside[0] in CLOSING else inside
        kind = nodes.superscript if mark[1] == "^" else nodes.subscript
        found += [nodes.Text(text[: mark.start()]), kind("", "", *typeset(inside))]
        text = text[end:]
    return [*found, nodes.Text(text)] if text else found


def _group_end(text: str, start: int) -> int:
    """Where a part that begins here ends: after its closing bracket, or after a run of letters and digits."""
    opening = text[start]
    if opening not in CLOSING:
        run = SHORT.match(text, start)
        return run.end() if run else start + 1
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == CLOSING[opening])
        if depth == 0:
            return place + 1
    raise ValueError(f"no {CLOSING[opening]} in the formula {text[start:]!r}")


def typeset_page(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname not in app.config.formula_pages:
        return
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language", "none") == "none":
            block.replace_self(nodes.paragraph("", "", *typeset(block.astext()), classes=["formula"]))
    for text in list(doctree.findall(nodes.Text)):
        if MARK.search(text) and not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.math):
            text.parent.replace(text, typeset(text.astext()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("formula_pages", [], "env")
    app.connect("doctree-read", typeset_page)
    return {"parallel_read_safe": True}
