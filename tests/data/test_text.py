"""Cutting text: nothing is lost, documents start where they should, and tokenizers do not notice."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_tokenizer import BPE
from trainshort.data import text as text_module
from trainshort.data.text import TextPart, parts_of_documents, parts_of_text, parts_of_texts, small_pieces
from trainshort.data.tokenizer import train_bpe

SPACES = train_bpe(iter(["a  b\n\n  c \n\td   e\n" * 50, "ab,  ba'  1\n\n\n" * 50]), 280)
START = re.compile(r"^= .* =$", re.MULTILINE)
lines = st.lists(st.sampled_from(["= A =", "= B =", "word and word", "", "  x", "== no", "= no", "long " * 9]))
words = st.text(st.sampled_from(" \n\tab,é'1"), max_size=120)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "READ_BYTES", 16)
    monkeypatch.setattr(text_module, "SMALL", 8)


def joined(parts: Iterable[TextPart]) -> list[str]:
    """Documents again; checks that first and last say so."""
    documents: list[str] = []
    held: list[str] = []
    for part in parts:
        assert part.first == (not held)
        held.append(part.text)
        if part.last:
            documents.append("".join(held))
            held = []
    assert not held
    return documents


@pytest.mark.usefixtures("_small_blocks")
@given(text=words)
def test_one_document(text: str) -> None:
    parts = list(parts_of_text(io.BytesIO(text.encode()), "name", "strict", None))
    assert joined(parts) == ([text] if text else [])
    assert all(len(part.text) <= 64 for part in parts)


@pytest.mark.usefixtures("_small_blocks")
@given(texts=st.lists(words))
def test_many_documents(texts: list[str]) -> None:
    assert joined(parts_of_documents(texts)) == [text for text in texts if text]


@pytest.mark.usefixtures("_small_blocks")
@given(rows=lines, cut=st.integers(1, 30))
def test_documents_inside_a_text(rows: list[str], cut: int) -> None:
    """However the text arrives, a document starts at each line that matches."""
    text = "\n".join(rows)
    blocks = [text[at : at + cut] for at in range(0, len(text), cut)]
    starts = [match.start() for match in START.finditer(text)]
    borders = sorted({0, *starts, len(text)})
    wanted = [text[a:b] for a, b in pairwise(borders)]
    assert joined(parts_of_texts(blocks, START)) == wanted


@pytest.mark.usefixtures("_small_blocks")
@given(text=words)
def test_a_tokenizer_does_not_notice_where_text_is_cut(text: str) -> None:
    pieces = list(small_pieces(text))
    assert "".join(pieces) == text
    if all(re.search(r"\s", piece[1:]) for piece in pieces[:-1]):  # else it had to be cut inside a word
        for tokenizer in (BPE, SPACES):
            assert [index for piece in pieces for index in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.usefixtures("_small_blocks")
def test_what_is_not_utf8_is_named() -> None:
    content = ("é" * 20).encode() + b"abc\xffdef"
    with pytest.raises(ValueError, match=r"book: not UTF-8: byte 0xff at 43 .*--errors replace"):
        list(parts_of_text(io.BytesIO(content), "book", "strict", None))
    parts = parts_of_text(io.BytesIO(content), "book", "replace", None)
    assert joined(parts) == ["é" * 20 + "abc\ufffddef"]
    with pytest.raises(ValueError, match=r"byte 0xc3 at 2 .*unexpected end"):
        list(parts_of_text(io.BytesIO(b"ab\xc3"), "book", "strict", None))
