"""Write examples/start.ipynb, the start page as a notebook: its Python as cells to run, its text between them.

python scripts/start_notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "start.md", ROOT / "examples" / "start.ipynb"


def notebook_of(page: str) -> str:
    """The notebook of a page of Markdown, as the text of its file."""
    pieces = re.split(r"^```python\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)  # text, code, text, ...
    cells = [cell(number, piece.strip("\n")) for number, piece in enumerate(pieces) if piece.strip()]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def cell(number: int, text: str) -> dict[str, Any]:
    if number % 2:
        return {
            "cell_type": "code", "id": f"cell-{number}", "metadata": {}, "execution_count": None, "outputs": [],
            "source": text.splitlines(keepends=True),
        }  # fmt: skip
    text = re.sub(r"\]\((?!https?://|#|\.\./)", "](../docs/", text)  # links of the page, from another folder
    return {
        "cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True),
    }  # fmt: skip


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {NOTEBOOK}")
