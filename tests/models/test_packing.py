"""Documents packed into one row are the same as documents in rows of their own, for every position method."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.models.small import EVERY_POSITION, VOCABULARY, language_model, random_tokens

DOCUMENTS = [
    [130, 1, 70],
    [5, 128, 128, 3],
    [40, 0, 0, 60],
    [0, 33, 2, 0],
    [200],
]


def borders(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_packed_logits_are_those_of_each_document(position: str, lengths: list[int]) -> None:
    model = language_model(position)
    tokens = random_tokens(1, sum(lengths))
    packed = model(tokens, cu_seqlens=borders(lengths))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_packed_loss_and_gradients(position: str) -> None:
    lengths = [100, 37, 150]
    model = language_model(position, dtype=torch.float64)
    tokens, targets = random_tokens(1, 287), random_tokens(1, 287, seed=1)
    packed = model.loss(tokens, targets, cu_seqlens=borders(lengths, torch.int64), reduction="sum")
    parts = zip(tokens.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True)
    alone = torch.stack([model.loss(*part, reduction="sum") for part in parts]).sum()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0.0)
    expected = torch.autograd.grad(alone, list(model.parameters()))
    for one, two in zip(torch.autograd.grad(packed, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=1e-5 * float(two.abs().max()))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_document_never_sees_its_neighbours(position: str) -> None:
    model = language_model(position)
    tokens = random_tokens(1, 200)
    changed = tokens.clone()
    changed[:, :90] = (changed[:, :90] + 1) % VOCABULARY
    pack = borders([90, 80, 30])
    before, after = model(tokens, cu_seqlens=pack), model(changed, cu_seqlens=pack)
    torch.testing.assert_close(after[:, 90:], before[:, 90:], rtol=1e-4, atol=1e-4)
    assert (after - before)[:, :90].abs().max().item() > 0.1


def test_learned_positions_limit_each_document_and_not_the_row() -> None:
    """Packing is for rows longer than any document: what ends is the position inside a document."""
    model = language_model("learned", max_length=40)
    tokens = random_tokens(1, 120)
    packed = model(tokens, cu_seqlens=borders([40, 40, 40]))
    alone = torch.cat([model(part) for part in tokens.split(40, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="end at 40 tokens, got 41"):
        model(tokens, cu_seqlens=borders([41, 39, 40]))


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize(
    ("pack", "match"),
    [
        ([0, 10], "end at the length 20"),
        ([0, 10, 30], "end at the length 20"),
        ([1, 20], "start at 0"),
        ([0, 15, 10, 20], "never go down"),
    ],
)
def test_borders_that_are_none_are_refused(pack: list[int], match: str, position: str) -> None:
    with pytest.raises(ValueError, match=match):
        language_model(position)(random_tokens(1, 20), cu_seqlens=torch.tensor(pack))


def test_packing_takes_one_row() -> None:
    with pytest.raises(ValueError, match="batch must be 1, got 2"):
        language_model()(random_tokens(2, 20), cu_seqlens=borders([10, 10]))


def test_packing_and_padding_do_not_combine() -> None:
    mask = torch.ones(1, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match="do not combine"):
        language_model()(random_tokens(1, 20), cu_seqlens=borders([10, 10]), key_padding_mask=mask)


def test_packing_and_a_cache_do_not_combine() -> None:
    model = language_model()
    cache = model.make_cache(1)
    with pytest.raises(ValueError, match="cu_seqlens and a cache do not combine"):
        model(random_tokens(1, 20), cu_seqlens=borders([10, 10]), cache=cache)
    assert cache.length == 0
