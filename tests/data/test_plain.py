"""A text file as tokens: those of the tokenizer, with bytes and words that add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshort.data.plain import PlainText, embedded_text, plain_text, tokenizer_of, with_special_tokens
from trainshort.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe

TEXT = "The quick brown fox,\n  déjà vu \N{SLIGHTLY SMILING FACE} jumps\tover 13 lazy dogs. " * 40


def words_tokenizer() -> Tokenizer:
    """One whose tokens are not the bytes of the text: it lowercases, and knows few words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors

    words = ["[UNK]", "[CLS]", "[SEP]", "the", "quick", "brown", "fox"]
    backend = Backend(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return FileTokenizer(backend.to_str())


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_bytes_and_words_of_a_text_add_up_whatever_the_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = {"bytes": ByteTokenizer, "bpe": lambda: train_bpe(iter([TEXT]), 300), "words": words_tokenizer}[
        kind
    ]()
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    found = plain_text(path, tokenizer)
    assert found.tokens.tolist() == tokenizer.encode(TEXT)
    assert (found.spans is None) == (kind != "words")
    whole = len(found.tokens)
    assert (found.bytes_of("text", 0, whole), found.words_of("text", 0, whole)) == (
        len(TEXT.encode()),
        len(TEXT.encode().split()),
    )
    parts = [found.bytes_of("text", a, a + 7) for a in range(0, whole - whole % 7, 7)]
    assert sum(parts) + found.bytes_of("text", whole - whole % 7, whole) == len(TEXT.encode())


def test_the_identity_is_of_the_text_and_not_of_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    found: list[PlainText] = [plain_text(path, each) for each in (ByteTokenizer(), words_tokenizer())]
    assert found[0].identity == found[1].identity
    assert found[0].tokenizer_identity != found[1].tokenizer_identity
    path.write_text(TEXT + "!")
    assert plain_text(path, ByteTokenizer()).identity != found[0].identity


def test_the_embedded_text_is_the_same_again_and_ends_with_a_line() -> None:
    text = embedded_text()
    assert text == embedded_text()
    assert 200_000 < len(text) <= 2**18
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"ab\xffc", r"byte 0xff at 2 is not UTF-8"), (b"a\0b", "holds zero bytes")],
)
def test_what_is_no_text_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        plain_text(path, ByteTokenizer())


def test_a_folder_without_a_tokenizer_says_why_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json, so no text can be made tokens"):
        tokenizer_of(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"SentencePiece")
    with pytest.raises(FileNotFoundError, match=r"a SentencePiece tokenizer\.model, which is not read, and no"):
        tokenizer_of(tmp_path)


def test_special_tokens_stand_around_a_text_that_is_cut() -> None:
    text = "The quick brown fox the quick"
    assert with_special_tokens(words_tokenizer(), text, 100) == [1, 3, 4, 5, 6, 3, 4, 2]
    assert with_special_tokens(words_tokenizer(), text, 5) == [1, 3, 4, 5, 2]
    assert with_special_tokens(ByteTokenizer(), "abc", 2) == [97, 98]
