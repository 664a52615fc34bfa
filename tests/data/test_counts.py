"""Bytes and words of spans of tokens, against the text itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_tokenizer import BPE
from trainshort.data import counts as counts_module
from trainshort.data.counts import Counts
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer

TABLES = {}
for each in (ByteTokenizer(), BPE):
    table = each.token_bytes()
    assert table is not None
    TABLES[type(each)] = Counts(table)
documents = st.lists(st.text(st.sampled_from(" \n\t\r\x0b\x0c\x1c\xa0\u2028abthe dog,é中"), min_size=1), min_size=1)


def encoded(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    return np.array(
        [index for text in texts for index in [*tokenizer.encode(text), tokenizer.end_id]], dtype=np.uint16
    )


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("at_once", [3, 2**20])
@given(texts=documents, data=st.data())
def test_counts_are_those_of_the_text_and_add_up(
    tokenizer: Tokenizer, at_once: int, texts: list[str], data: st.DataObject
) -> None:
    tokens, counts = encoded(tokenizer, texts), TABLES[type(tokenizer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts_module, "AT_ONCE", at_once)
        size, words = counts.count(tokens, None)
        assert size == sum(len(text.encode()) for text in texts)
        assert words == sum(len(text.encode().split()) for text in texts)
        cut = data.draw(st.integers(0, len(tokens)))
        first = counts.count(tokens[:cut], None)
        second = counts.count(tokens[cut:], int(tokens[cut - 1]) if cut else None)
        assert (first[0] + second[0], first[1] + second[1]) == (size, words)
