"""The docs site: `make docs` builds it from the Markdown files beside this one, and fails at any warning."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import trainshort  # noqa: E402  of this tree

project = "trainshort"
release = trainshort.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "formulas",
    "source_pages",
]
formula_pages = ["alibi", "certificate", "proof", "proof-cache", "context-parallel", "attention", "faq"]
highlight_language = "none"
nitpicky = True
default_role = "code"
myst_heading_anchors = 4
autodoc_typehints = "none"  # signatures would be all types: Args says what each argument is
add_module_names = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
pygments_dark_style = "github-dark"
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
