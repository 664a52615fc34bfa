"""Texts to continue: as rows of tokens, and back to texts, by the tokenizer of a model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from trainshort.common.tokenizer_json import END_NAMES, package_errors

WHERE = "model.tokenizer"  # in errors


def check_texts(texts: object, tokenizer: Any) -> None:
    """Refuse what is neither a string nor a list of them, and texts for a model that cannot read."""
    rows = [texts] if isinstance(texts, str) else texts
    if not isinstance(rows, list) or not all(isinstance(text, str) for text in rows):
        kinds = sorted({type(row).__name__ for row in rows}) if isinstance(rows, list) else []
        came = f"a list of {' and '.join(kinds)}" if kinds else type(rows).__name__
        raise TypeError(f"tokens must be an int tensor [batch, length], a string or a list of strings; got {came}")
    if not rows:
        raise ValueError("tokens must hold at least one text, got an empty list")
    if tokenizer is None:
        raise TypeError(
            f"tokens must be an int tensor [batch, length], got {type(texts).__name__}: this model has no tokenizer "
            "to read a text with. ts.load sets model.tokenizer where the folder has a tokenizer.json; with one of "
            "your own, pass torch.tensor([tokenizer.encode(text).ids])"
        )


def stops_at(end: int | None, vocab_size: int) -> tuple[int, ...]:
    """Where a tokenizer says that texts end, as stop tokens: none if it lies outside the model's vocabulary."""
    return () if end is None or end >= vocab_size else (end,)


class Prompts:
    """Texts as tokens [B, T], short ones padded on the left, where the mask [B, T] is False."""

    def __init__(self, texts: list[str], tokenizer: Any, vocab_size: int, device: torch.device) -> None:
        self.given, self.tokenizer = texts, _without_limits(tokenizer)
        self.end = _end_of(tokenizer)
        self.rows = [self._encode(text) for text in texts]
        if (highest := max(map(max, self.rows))) >= vocab_size:
            raise ValueError(f"{WHERE} gives the token {highest}, and the model has tokens in [0, {vocab_size}) only")
        self.length = max(map(len, self.rows))
        padding = [self.length - len(row) for row in self.rows]
        filled = [[0] * missing + row for missing, row in zip(padding, self.rows, strict=True)]
        self.tokens = torch.tensor(filled, dtype=torch.int64, device=device)
        place = torch.arange(self.length, device=device)
        self.mask = place >= torch.tensor(padding, device=device)[:, None] if any(padding) else None

    def continued(self, tokens: Tensor, stops: Collection[int]) -> list[str]:
        """The texts with what was generated: tokens [B, T + new], of each row up to its first stop token."""
        texts = []
        for text, row, said in zip(self.given, self.rows, tokens[:, self.length :].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(said) if token in stops), len(said))
            # Decoded as one text, because what a token stands for may depend on those before it.
            texts.append(text + self._decode(row + said[:end])[len(self._decode(row)) :])
        return texts

    def _encode(self, text: str) -> list[int]:
        with package_errors(WHERE, "this tokenizer fails on a text"):
            if _is_of_package(self.tokenizer):
                ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
            else:
                ids = list(self.tokenizer.encode(text))
        if not ids and self.end is None:
            raise ValueError("a prompt must not be empty: this tokenizer has no token that a text could begin with")
        return ids or [self.end]  # a text begins where another ended

    def _decode(self, ids: Iterable[int]) -> str:
        kept = [each for each in ids if each != self.end]
        with package_errors(WHERE, "this tokenizer fails on tokens"):
            if _is_of_package(self.tokenizer):
                return str(self.tokenizer.decode(kept, skip_special_tokens=False))
            return str(self.tokenizer.decode(kept))


def _is_of_package(tokenizer: Any) -> bool:
    """Whether it is a Tokenizer of the package tokenizers, as `load` sets it; in training it is one of our own."""
    return hasattr(tokenizer, "no_truncation")


def _without_limits(tokenizer: Any) -> Any:
    """The tokenizer, or where its file says that texts are cut or padded, a copy that does neither."""
    if not _is_of_package(tokenizer) or (tokenizer.truncation is None and tokenizer.padding is None):
        return tokenizer
    own = copy.deepcopy(tokenizer)
    own.no_truncation()
    own.no_padding()
    return own


def _end_of(tokenizer: Any) -> int | None:
    """The token that ends a document."""
    if not _is_of_package(tokenizer):
        end: int | None = tokenizer.end_id
        return end
    ids = (tokenizer.token_to_id(name) for name in END_NAMES)
    return next((each for each in ids if each is not None), None)
