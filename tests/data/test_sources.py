"""Every kind of source gives its documents, and every mistake in one is named with its place."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from trainshort.data import sources as sources_module
from trainshort.data import text as text_module
from trainshort.data.sources import WIKITEXT_START, Sources, standard_library

DOCUMENTS = ["first document\n\nwith two paragraphs", "zweites Dokument: äöü 中文", "third"]


def documents(*names: object, **options: Any) -> list[str]:
    return list(Sources(tuple(map(str, names)), **options).documents())


def write_rows(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts) + "\n")
    return path


def test_text_files(tmp_path: Path) -> None:
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / f"{number}.weird").write_text(text)
    assert documents(*(tmp_path / f"{number}.weird" for number in range(3))) == DOCUMENTS


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert documents(tmp_path / "a.txt") == ["a\r\nb\rc\n"]


def test_rows(tmp_path: Path) -> None:
    assert documents(write_rows(tmp_path / "a.jsonl", DOCUMENTS)) == DOCUMENTS
    assert documents(write_rows(tmp_path / "b.jsonl", DOCUMENTS, "body"), text_field="body") == DOCUMENTS


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [*DOCUMENTS, None, ""], "other": [1, 2, 3, 4, 5]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == DOCUMENTS
    with pytest.raises(ValueError, match=r"has no column 'body'; it has text, other"):
        documents(tmp_path / "a.parquet", text_field="body")
    (tmp_path / "b.parquet").write_text("text")
    with pytest.raises(ValueError, match=r"b\.parquet: not a parquet file"):
        documents(tmp_path / "b.parquet")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_files(tmp_path: Path, suffix: str, pack: Any) -> None:
    rows = write_rows(tmp_path / "a.jsonl", DOCUMENTS).read_bytes()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(rows))
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(b"a text"))
    assert documents(tmp_path / f"a.jsonl{suffix}", tmp_path / f"b.txt{suffix}") == [*DOCUMENTS, "a text"]
    (tmp_path / f"c.txt{suffix}").write_bytes(pack(bytes(range(65, 90)) * 100)[:-9])
    with pytest.raises(ValueError, match=rf"c\.txt{suffix}: not a whole {suffix} file"):
        documents(tmp_path / f"c.txt{suffix}")
    (tmp_path / f"d.txt{suffix}").write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match=rf"d\.txt{suffix}: not a whole {suffix} file"):
        documents(tmp_path / f"d.txt{suffix}")


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "image.png").write_bytes(b"\xff\xfe")
    (tmp_path / ".git" / "notes.txt").write_text("hidden")
    write_rows(tmp_path / "sub" / "c.jsonl", ["third", "fourth"])
    assert documents(tmp_path) == ["first", "second", "third", "fourth"]
    assert documents(tmp_path, pattern="*.md") == ["second"]
    with pytest.raises(ValueError, match=r"no file in this folder matches '\*\.c'"):
        documents(tmp_path, pattern="*.c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file in this folder looks like text"):
        documents(tmp_path / "empty")


def test_documents_that_start_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "wiki.tokens").write_text(" \n = A = \n\n text \n = = B = = \n more \n = C = \n end \n")
    found = documents(tmp_path / "wiki.tokens", document_start=r"^ = [^=].* = $")
    assert found == [" \n", " = A = \n\n text \n = = B = = \n more \n", " = C = \n end \n"]
    with pytest.raises(ValueError, match="document_start must be a regular expression, got '\\('"):
        documents(tmp_path / "wiki.tokens", document_start="(")


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"bok\.txt: no such file or folder; did you mean 'book\.txt'\?"):
        documents(tmp_path / "bok.txt")


def test_mistakes_in_rows_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not valid JSON"):
        documents(path)
    path.write_text('{"body": "fine"}\n')
    with pytest.raises(ValueError, match=r"line 1: no text in field 'text' \(got fields body\)"):
        documents(path)
    path.write_text('["fine"]\n')
    with pytest.raises(ValueError, match="line 1: no text in field 'text'"):
        documents(path)
    path.write_text('{"text": "half \\ud800 of a pair"}\n')
    with pytest.raises(ValueError, match="line 1: not valid Unicode"):
        documents(path)
    assert documents(path, errors="replace") == ["half ? of a pair"]


def test_the_standard_library() -> None:
    names = [item.name for item in standard_library()]
    assert len(names) > 300
    assert names == sorted(names)
    assert any(name.endswith("argparse.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    first = next(iter(Sources(("stdlib",)).documents()))
    assert first == Path(names[0]).read_text(encoding="utf-8")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[str]]) -> list[Any]:
    asked: list[Any] = []

    def load_dataset(path: str, config: str | None, *, streaming: bool) -> dict[str, list[dict[str, str]]]:
        asked.append((path, config, streaming))
        if path == "no/where":
            raise ConnectionError("offline")
        return {name: [{"text": text} for text in texts] for name, texts in splits.items()}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_datasets(monkeypatch, {"train": DOCUMENTS, "test": ["a test"]})
    assert documents("hf:some/texts") == DOCUMENTS
    assert documents("hf:some/texts/english:test") == ["a test"]
    assert asked == [("some/texts", None, True), ("some/texts", "english", True)]
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        documents("hf:some/texts:dev")
    with pytest.raises(ValueError, match="named hf:ORG/NAME or hf:ORG/NAME/CONFIG"):
        documents("hf:a/b/c/d")
    with pytest.raises(RuntimeError, match=r"hf:no/where: the package datasets cannot load it \(offline\)"):
        documents("hf:no/where")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hf:some/texts needs .* pip install 'trainshort\[datasets\]'"):
        documents("hf:some/texts")


def test_wikitext_rows_are_lines_of_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["", " = First = \n", "", " text \n", " = = TextPart = = \n", " more \n", " = Second = \n", " end \n"]
    fake_datasets(monkeypatch, {"train": rows})
    found = documents("hf:Salesforce/wikitext/wikitext-103-raw-v1")
    assert found == [" = First = \n text \n = = TextPart = = \n more \n", " = Second = \n end \n"]
    assert re.search(WIKITEXT_START, " = = TextPart = = \n", re.MULTILINE) is None


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    write_rows(tmp_path / "b.jsonl", DOCUMENTS)
    sources = Sources((str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")))
    seen = [sources.done for _ in sources.parts()]
    assert seen == sorted(seen)
    assert 0 < seen[0] < sources.total
    assert sources.done == sources.total == 3_000_000 + (tmp_path / "b.jsonl").stat().st_size


# Folders and files from strangers


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret, texts = tmp_path / "secret", tmp_path / "texts"
    secret.mkdir()
    (texts / "inner").mkdir(parents=True)
    (secret / "key.txt").write_text("secret")
    (texts / "a.txt").write_text("mine")
    (texts / "b.txt").symlink_to(secret / "key.txt")
    (texts / "c").symlink_to(secret)
    (texts / "d.txt").symlink_to("../secret/key.txt")
    (texts / "inner" / "e.txt").symlink_to("../a.txt")  # stays inside, and is the same file again
    for options in (
        {},
        {"pattern": "**/*.txt"},
        {"pattern": "*/*.txt"},
        {"pattern": "c/*"},
        {"pattern": "../*/*.txt"},
    ):
        try:
            found = list(Sources((str(texts),), **options).documents())
        except ValueError as error:
            assert "links that lead out of it are not followed" in str(error)  # noqa: PT017
        else:
            assert found == ["mine"]
    assert Sources((str(texts),)).links_left_out == 2
    (tmp_path / "link").symlink_to(texts)  # the folder that was named may be a link itself
    assert list(Sources((str(tmp_path / "link"),)).documents()) == ["mine"]


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "LONGEST_LINE", 100)
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"text": "x" * (100 - len('{"text": ""}\n'))}) + "\n"
    assert len(row) == 100
    path.write_text(row)
    assert len(list(Sources((str(path),)).documents())) == 1
    path.write_text("\n" + row.replace("x", "xx", 1))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: longer than 100 bytes, the most that one"):
        list(Sources((str(path),)).documents())


def test_a_line_is_never_read_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even from a small file that unpacks to a large one."""
    monkeypatch.setattr(sources_module, "LONGEST_LINE", 10_000)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        for _ in range(40):
            file.write(b"x" * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="longer than 10,000 bytes"):
            list(Sources((str(tmp_path / "rows.jsonl.gz"),)).documents())
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_deep_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"line 2: not valid JSON \(objects or lists nested more than 64 deep\)"):
        list(Sources((str(tmp_path / "rows.jsonl"),)).documents())


def test_one_line_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where documents start at lines that have to be looked for."""
    monkeypatch.setattr(text_module, "READ_BYTES", 64)
    text = "# one\n" + "word " * 500 + "# no start\n# two\nend"
    (tmp_path / "a.txt").write_text(text)
    sources = Sources((str(tmp_path / "a.txt"),), document_start="^# ")
    assert max(len(part.text) for part in sources.parts()) < 4 * 64
    assert list(sources.documents()) == ["# one\n" + "word " * 500 + "# no start\n", "# two\nend"]
