"""The validation text: whole documents from everywhere in the input, by the seed, and said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_prepare import assert_counts, prepared, texts_of
from tests.data.test_sources import write_rows
from trainshort.data import text as text_module
from trainshort.data.config import PrepareConfig
from trainshort.data.dataset import TokenData
from trainshort.data.prepare import prepare
from trainshort.data.split import DOCUMENTS, PASSAGES, Choice, choose_by_size
from trainshort.data.text import TextPart


def books(folder: Path, count: int, size: int = 300) -> list[str]:
    folder.mkdir()
    texts = [f"Book {number}. " + f"page {number}\n" * (size // 8) for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    return texts


@pytest.mark.parametrize("block", [2**20, 64])
def test_whole_books_are_drawn_from_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Also those that come in many parts. Not the last ones: each of them at some seed."""
    monkeypatch.setattr(text_module, "READ_BYTES", block)
    texts = books(tmp_path / "books", 40)
    found = set()
    for seed in range(12):
        data = prepared(tmp_path / "books", tmp_path / f"data{seed}", seed=seed)
        validation = texts_of(data, "validation")
        assert sorted(texts_of(data, "train") + validation) == sorted(texts)
        assert len(validation) in (1, 2)
        found |= set(validation)
        assert data.meta["validation"]["how"] == DOCUMENTS
    assert len(found) > 10
    assert any(texts.index(text) < 20 for text in found)


def test_what_meta_json_says_of_it(tmp_path: Path) -> None:
    books(tmp_path / "books", 40)
    data = prepared(tmp_path / "books", tmp_path / "data", seed=3)
    about = data.meta["validation"]
    assert (about["how"], about["seed"], about["asked"]) == (DOCUMENTS, 3, 0.05)
    assert about["share"] == pytest.approx(data.bytes_of("validation") / data.meta["bytes"], abs=1e-6)
    chosen = [Path(name).read_text() for name in about["from"]]
    assert chosen == texts_of(data, "validation")
    assert "whole documents, drawn from all of the input with seed 3" in data.summary()


def test_of_three_long_books_each_gives_a_passage(tmp_path: Path) -> None:
    texts = books(tmp_path / "books", 3, size=20_000)
    data = prepared(tmp_path / "books", tmp_path / "data", validation_fraction=0.1)
    passages, rest = texts_of(data, "validation"), texts_of(data, "train")
    assert len(passages) == 3
    for text, passage in zip(texts, passages, strict=True):
        assert passage in text
        assert len(passage) == pytest.approx(0.1 * len(text), rel=0.02)
    assert sum(map(len, rest)) + sum(map(len, passages)) == sum(map(len, texts))
    assert data.meta["validation"]["how"] == PASSAGES
    assert "passages of documents too long to take whole" in data.summary()
    assert_counts(data)


def test_files_that_are_named_for_validation_are_not_trained_on(tmp_path: Path) -> None:
    texts = books(tmp_path / "books", 5)
    named = (str(tmp_path / "books" / ".." / "books" / "01.txt"),)
    data = prepared(tmp_path / "books", tmp_path / "data", validation=named)
    assert texts_of(data, "validation") == [texts[1]]
    assert texts_of(data, "train") == [texts[0], *texts[2:]]
    assert data.meta["validation"] == {
        "how": "named sources",
        "seed": None,
        "asked": None,
        "share": pytest.approx(0.2, rel=0.01),
        "from": list(named),
    }
    config = PrepareConfig(sources=named, validation=named, out=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="nothing is left to train on, since all of it is named for validation"):
        prepare(config, progress=False)


def test_a_vocabulary_is_trained_without_the_validation_text(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [f"{chr(0x4E00 + number)}" * 30 for number in range(40)])
    data = prepared(rows, tmp_path / "data", vocab=400)
    held = {text[0] for text in texts_of(data, "validation")}
    table = data.tokenizer.token_bytes()
    assert table is not None
    assert held
    assert not [each for each in table if each.decode("utf-8", "ignore")[:1] in held and len(each) >= 3]


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.95),
    seed=st.integers(0, 5),
)
def test_the_share_is_near_what_was_asked(sizes: list[int], fraction: float, seed: int) -> None:
    documents, passages = choose_by_size(np.array(sizes), fraction, seed)
    assert (documents, passages) == choose_by_size(np.array(sizes), fraction, seed)
    kept = sum(sizes[number] for number in documents)
    kept += sum(end - start for start, end in passages.values())
    wanted = fraction * sum(sizes)
    assert wanted / 2 - len(sizes) <= kept <= 2 * wanted
    assert kept < sum(sizes), "something is left to train on"
    assert all(0 <= start < end <= sizes[number] for number, (start, end) in passages.items())
    assert not documents & passages.keys()


@given(data=st.data(), text=st.text("ab \n", min_size=1, max_size=80))
def test_cutting_a_passage_out_loses_nothing(data: Any, text: str) -> None:
    """Whatever the parts that the document comes in."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts = [TextPart(each, index == 0, index == len(pieces) - 1) for index, each in enumerate(pieces)]
    start = data.draw(st.integers(0, len(text) - 1))
    passage = (start, data.draw(st.integers(start + 1, len(text))))
    found = list(Choice(PASSAGES, passages={0: passage}).assign(parts))
    assert "".join(part.text for _, part in found) == text
    for split in ("train", "validation"):
        begun = False
        for part in (part for name, part in found if name == split):
            assert part.first != begun, "each document begins once"
            begun = not part.last
        assert not begun, "and ends"


def test_the_seed_and_the_text_decide_alone(tmp_path: Path) -> None:
    books(tmp_path / "books", 30)
    one, two = (prepared(tmp_path / "books", tmp_path / name, seed=5).identity for name in ("a", "b"))
    assert one == two
    assert TokenData(tmp_path / "a").meta["validation"] == TokenData(tmp_path / "b").meta["validation"]


@pytest.mark.parametrize(("line", "lines"), [(600, 13), (1000, 10), (2000, 10), (3900, 19), (80, 18), (5, 20)])
def test_a_short_text_of_long_lines_keeps_about_what_was_asked(line: int, lines: int) -> None:
    """An edge moves to the next line only if that is near: a passage is never empty and never twice as long."""
    text = "\n".join(("word " * line)[:line] for _ in range(lines)) + "\n"
    for seed in range(40):
        documents, passages = choose_by_size(np.array([len(text)]), 0.05, seed)
        choice = Choice(PASSAGES, documents, passages)
        kept = sum(
            len(part.text) for split, part in choice.assign([TextPart(text, True, True)]) if split == "validation"
        )
        assert 0.7 * int(0.05 * len(text)) <= kept <= 1.3 * 0.05 * len(text), (seed, kept / len(text))
