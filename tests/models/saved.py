"""What tests of saving share: a tiny tokenizer, and what it means that a model came back."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import trainshort as ts
from tests.models.small import random_tokens

Model = ts.LanguageModel | ts.Encoder


def tiny_tokenizer(words: str = "train short test long") -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(["[unknown]", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def assert_same_model(found: Model, saved: Model) -> None:
    """Bit for bit: config, every tensor, and what the model says."""
    assert type(found) is type(saved)
    assert found.config == saved.config
    one, two = found.state_dict(), saved.state_dict()
    assert list(one) == list(two)
    for name, tensor in two.items():
        assert one[name].dtype == tensor.dtype, name
        assert torch.equal(one[name], tensor), name
    tokens = random_tokens(2, 140)
    assert torch.equal(found.eval()(tokens), saved.eval()(tokens))
