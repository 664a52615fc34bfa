"""Texts in, texts out: what generate makes of strings, by the tokenizer of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

import trainshort as ts
from tests.models.saved import tiny_tokenizer
from tests.models.small import language_model
from trainshort.data.tokenizer import ByteTokenizer

TEXTS = ["To be, or not to be", "é", "a longer text, so that others are padded"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
END = 256


def reader(tokenizer: Any = None, **changes: Any) -> ts.LanguageModel:
    """A model of bytes, by default with the tokenizer as ts.load sets it."""
    model = language_model(vocab_size=257, **changes)
    model.tokenizer = tokenizer or Tokenizer.from_str(ByteTokenizer().to_str())
    return model


def by_tokens(model: ts.LanguageModel, text: str, **options: Any) -> list[int]:
    """The new tokens, from the bytes of the text."""
    tokens = torch.tensor([list(text.encode())])
    return model.generate(tokens, **(OPTIONS | options))[0, tokens.shape[1] :].tolist()


def test_a_string_gives_a_string() -> None:
    model = reader()
    new = by_tokens(model, TEXTS[0], stop_tokens=[END])
    assert model.generate(TEXTS[0], **OPTIONS) == TEXTS[0] + ByteTokenizer().decode(new)


@pytest.mark.parametrize("options", [{}, {"bounded": True}, {"use_cache": False}], ids=str)
def test_each_text_of_a_list_as_if_it_were_alone(options: dict[str, Any]) -> None:
    model = reader()
    found = model.generate(TEXTS, **OPTIONS, **options)
    assert isinstance(found, list)
    assert found == [model.generate(text, **OPTIONS) for text in TEXTS]
    assert len(set(found)) == 3


def test_a_model_in_training_has_a_tokenizer_of_ours() -> None:
    model = reader(ByteTokenizer())
    assert model.generate(TEXTS, **OPTIONS) == reader().generate(TEXTS, **OPTIONS)


def test_words_are_decoded_as_one_text() -> None:
    """A tokenizer of words puts spaces between them, also between the prompt and what comes after it."""
    model = language_model(vocab_size=5)
    model.tokenizer = tiny_tokenizer()
    found = model.generate("train short", **OPTIONS)
    assert found.startswith("train short ")
    assert len(found.split(" ")) == 14
    assert set(found.split(" ")) <= {"[unknown]", "train", "short", "test", "long"}


def test_a_text_ends_with_the_end_of_text() -> None:
    model = reader()
    free = by_tokens(model, "abc", max_new_tokens=12)
    place = next(place for place in range(1, 12) if free[place] not in free[:place])
    with torch.no_grad():  # the head says `end` instead
        model.head.weight[[END, free[place]]] = model.head.weight[[free[place], END]]
    columns: list[Tensor] = []
    found = model.generate("abc", on_token=columns.append, **OPTIONS)
    assert found == "abc" + ByteTokenizer().decode(free[:place])
    assert len(columns) == place + 1
    endless = model.generate("abc", stop_tokens=(), **OPTIONS)
    assert len(endless) > len(found)
    assert endless.startswith(found)


def test_a_stop_token_that_is_a_character_stays() -> None:
    model = reader()
    free = by_tokens(model, "abc")
    place = next(place for place in range(1, 12) if free[place] not in free[:place] and free[place] < 128)
    found = model.generate("abc", eos_token_id=free[place], **OPTIONS)
    assert found == "abc" + ByteTokenizer().decode(free[: place + 1])


def test_an_end_of_text_that_the_model_has_no_token_for_ends_nothing() -> None:
    model = language_model(vocab_size=END)
    model.tokenizer = ByteTokenizer()
    assert model.generate("abc", **OPTIONS) == model.generate("abc", stop_tokens=(), **OPTIONS)
    with pytest.raises(ValueError, match="max_new_tokens=None needs stop_tokens"):
        model.generate("abc", max_new_tokens=None)


def test_an_empty_text_begins_where_another_ended() -> None:
    model = reader()
    new = model.generate(torch.tensor([[END]]), stop_tokens=[END], **OPTIONS)[0, 1:]
    assert model.generate("", **OPTIONS) == ByteTokenizer().decode(new.tolist())
    other = language_model(vocab_size=5)
    other.tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="a prompt must not be empty"):
        other.generate("", **OPTIONS)


def test_a_tokenizer_that_cuts_texts_does_not_cut_prompts() -> None:
    cutting = Tokenizer.from_str(ByteTokenizer().to_str())
    cutting.enable_truncation(4)
    cutting.enable_padding(length=64)
    assert reader(cutting).generate(TEXTS, **OPTIONS) == reader().generate(TEXTS, **OPTIONS)
    assert cutting.truncation is not None


def test_no_new_tokens_are_the_text() -> None:
    assert reader().generate(TEXTS, max_new_tokens=0) == TEXTS


def test_what_cannot_be() -> None:
    model = reader()
    with pytest.raises(ValueError, match="at least one text, got an empty list"):
        model.generate([], **OPTIONS)
    with pytest.raises(ValueError, match="key_padding_mask goes with tokens"):
        model.generate("a", key_padding_mask=torch.ones(1, 1, dtype=torch.bool), **OPTIONS)
    small = language_model()
    small.tokenizer = model.tokenizer
    with pytest.raises(ValueError, match=r"gives the token 97, and the model has tokens in \[0, 61\)"):
        small.generate("a", **OPTIONS)


def test_seeds_make_texts_repeatable() -> None:
    model = reader()
    one, two, other = (model.generate(TEXTS, max_new_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert one == two != other
