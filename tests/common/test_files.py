"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshort.common.files import new_folder, write_text


def test_errors_name_what_was_asked_for(tmp_path: Path) -> None:
    """Not the name that a file has before it is whole."""
    with pytest.raises(FileNotFoundError, match=r"'[^']*/missing/x\.json'$"):
        write_text(tmp_path / "missing" / "x.json", "text")
    with pytest.raises(IsADirectoryError, match=rf"'{tmp_path}'$"):
        write_text(tmp_path, "text")
    with pytest.raises(FileNotFoundError, match=r"/new/a/b'$"), new_folder(tmp_path / "new") as folder:
        (folder / "a" / "b").write_text("text")
    with pytest.raises(FileNotFoundError, match=r"'/other'$"), new_folder(tmp_path / "new"):
        raise FileNotFoundError(2, "No such file", "/other")
    assert list(tmp_path.iterdir()) == []
