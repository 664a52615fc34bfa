"""Tokenizers: every text comes back, ours are files of the package tokenizers, and text is never a special token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.hostile_json import EVERY, survives
from trainshort.common.tokenizer_json import END
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, tokenizer_from_text, train_bpe

TEXT = "the quick brown fox jumps over the lazy dog, and then the dog sleeps\n" * 20
BPE = train_bpe(iter([TEXT]), 290)
LOWERCASE = Backend(models.WordLevel({"<unk>": 0, "</s>": 1, "the": 2, "dog": 3}, unk_token="<unk>"))
LOWERCASE.normalizer = normalizers.Lowercase()
LOWERCASE.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(text=texts)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    table = tokenizer.token_bytes()
    assert table is not None
    assert b"".join(table[index] for index in ids) == text.encode()
    assert tokenizer.end_id not in ids


@given(text=texts)
def test_bytes_are_a_tokenizer_of_the_package_too(text: str) -> None:
    ours, theirs = ByteTokenizer(), Backend.from_str(ByteTokenizer().to_str())
    assert theirs.get_vocab_size() == ours.vocab_size == 257
    assert theirs.token_to_id(END) == ours.end_id == 256
    theirs.encode_special_tokens = True
    assert theirs.encode(text).ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_text_that_looks_like_the_end_is_text(tokenizer: Tokenizer) -> None:
    text = f"a {END} b"
    ids = tokenizer.encode(text)
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_id or 0, *ids]) == text + text


def test_a_bpe_has_the_size_that_was_asked_for_and_joins() -> None:
    assert BPE.vocab_size == 290
    assert len(BPE.encode(TEXT)) < len(TEXT.encode()) / 2


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert type(again) is type(tokenizer)
        assert (again.vocab_size, again.end_id) == (tokenizer.vocab_size, tokenizer.end_id)
        assert again.encode("the dog é") == tokenizer.encode("the dog é")
    Backend.from_file(str(tmp_path / "tokenizer.json"))


def test_other_tokenizers_have_no_table() -> None:
    """Lower case loses which case it was, so bytes do not follow from tokens."""
    tokenizer = tokenizer_from_text(LOWERCASE.to_str())
    assert tokenizer.token_bytes() is None
    assert tokenizer.end_id == 1
    assert tokenizer.encode("The DOG x") == [2, 3, 0]


def test_a_prefix_space_has_no_table() -> None:
    backend = Backend.from_str(BPE.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    assert tokenizer_from_text(backend.to_str()).token_bytes() is None


def test_the_end_token() -> None:
    text = LOWERCASE.to_str()
    assert tokenizer_from_text(text, end_token="dog").end_id == 3
    with pytest.raises(ValueError, match="has no token 'dgo' to end documents with; did you mean 'dog'"):
        tokenizer_from_text(text, end_token="dgo")
    nameless = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    assert tokenizer_from_text(nameless.to_str()).end_id is None


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not valid JSON"), (json.dumps({"version": "1.0"}), "not a tokenizer of the package tokenizers")],
)
def test_files_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"a tokenizer is a tokenizer\.json or a folder with one"):
        load_tokenizer(tmp_path / "none.json")


# Files from strangers


def changed_tokenizer(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    values = json.loads(LOWERCASE.to_str())
    change(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    return tmp_path / "tokenizer.json"


def test_a_token_with_a_number_beyond_all_others(tmp_path: Path) -> None:
    """A table by token would have 400 million rows, and take seven gigabytes."""
    path = changed_tokenizer(tmp_path, lambda values: values["model"]["vocab"].update(dog=400_000_000))
    with pytest.raises(ValueError, match=r"has 4 tokens, and gives one of them the number 400,000,000"):
        load_tokenizer(path)


def test_gaps_between_numbers_are_fine(tmp_path: Path) -> None:
    path = changed_tokenizer(tmp_path, lambda values: values["model"]["vocab"].update(dog=60_000))
    assert load_tokenizer(path).vocab_size == 60_001


def test_a_panic_of_the_package_is_an_error_like_others(tmp_path: Path) -> None:
    strange = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path = changed_tokenizer(tmp_path, lambda values: values.update(normalizer=strange))
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer of the package tokenizers"):
        load_tokenizer(path)


def test_a_tokenizer_that_fails_on_a_text(tmp_path: Path) -> None:
    path = changed_tokenizer(tmp_path, lambda values: values["model"].update(unk_token="missing"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer fails on a text"):
        load_tokenizer(path).encode("unheard")


def test_padding_without_end(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "x"}
    path = changed_tokenizer(tmp_path, lambda values: values.update(padding=padding))
    with pytest.raises(ValueError, match=r"pads texts to 1,000,000,000,000 tokens; at most 1,048,576 are allowed"):
        load_tokenizer(path)


@pytest.mark.parametrize("every", EVERY)
def test_tokenizer_json(tmp_path: Path, every: int) -> None:
    path = changed_tokenizer(tmp_path, lambda values: None)

    def use() -> None:
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("the dog sleeps"))
        tokenizer.token_bytes()

    survives(path, use, home=tmp_path, every=every)


@pytest.mark.parametrize("character", ["a", "=", " ", "\n", "7", "é"])
def test_a_long_run_of_one_character_takes_no_longer_than_other_text(character: str) -> None:
    """A word of a megabyte took minutes: time grew with its square."""
    started = time.perf_counter()
    tokenizer = train_bpe(iter([character * 500_000, TEXT]), 300)
    assert time.perf_counter() - started < 10
    text = "the dog" + character * 3000 + "the dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    again = tokenizer_from_text(tokenizer.to_str())  # the limit is in the file: everyone gets the same tokens
    assert again.encode(text) == tokenizer.encode(text) == Backend.from_str(tokenizer.to_str()).encode(text).ids


def test_ordinary_text_is_cut_into_words_as_before() -> None:
    text = "It's 2024: we'll   see\n\n\tthe  dog's naïve x_1 == y; 中文 \u00a0ok  \n"
    plain = Backend.from_str(BPE.to_str())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert plain.encode(text).ids == BPE.encode(text)
