"""Sampling: tokens are chosen from the distribution that temperature, top_k and top_p describe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import VOCABULARY, language_model, random_tokens


def probabilities(model: ts.LanguageModel, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Of the next token, [V] in float64, for one row."""
    with torch.no_grad():
        return (model(tokens)[0, -1].double() / temperature).softmax(-1)


def sample(model: ts.LanguageModel, tokens: Tensor, count: int, **options: Any) -> Tensor:
    """How often each token comes next, of `count` rows with the same prompt: frequencies [V]."""
    out = model.generate(tokens.expand(count, -1), max_new_tokens=1, seed=0, **options)
    return torch.bincount(out[:, -1], minlength=VOCABULARY).double() / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_probabilities(temperature: float) -> None:
    model, tokens = language_model(d_model=8), random_tokens(1, 10)
    expected = probabilities(model, tokens, temperature)
    found = sample(model, tokens, 4000, temperature=temperature)
    spread = (expected * (1 - expected) / 4000).sqrt()
    assert bool(((found - expected).abs() <= 5 * spread + 1e-3).all())
    assert int((found > 0).sum()) > 3


@pytest.mark.parametrize("top_k", [2, 5, 20])
def test_top_k_samples_among_the_k_most_probable(top_k: int) -> None:
    model, tokens = language_model(d_model=8), random_tokens(1, 10)
    expected = probabilities(model, tokens, 4.0)
    allowed = expected.argsort(descending=True)[:top_k]
    kept = torch.zeros_like(expected)
    kept[allowed] = expected[allowed] / expected[allowed].sum()
    found = sample(model, tokens, 4000, temperature=4.0, top_k=top_k)
    assert set(found.nonzero()[:, 0].tolist()) == set(allowed.tolist())
    assert bool(((found - kept).abs() <= 5 * (kept * (1 - kept) / 4000).sqrt() + 1e-3).all())


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_top_p_samples_among_the_fewest_that_reach_p(top_p: float) -> None:
    model, tokens = language_model(d_model=8), random_tokens(1, 10)
    expected = probabilities(model, tokens, 4.0)
    allowed: list[int] = []
    for token in expected.argsort(descending=True).tolist():
        if sum(expected[allowed].tolist()) < top_p:
            allowed.append(token)
    kept = torch.zeros_like(expected)
    kept[allowed] = expected[allowed] / expected[allowed].sum()
    found = sample(model, tokens, 4000, temperature=4.0, top_p=top_p)
    assert set(found.nonzero()[:, 0].tolist()) == set(allowed)
    assert bool(((found - kept).abs() <= 5 * (kept * (1 - kept) / 4000).sqrt() + 1e-3).all())


def test_top_k_comes_before_top_p() -> None:
    """top_p counts the probability that top_k leaves."""
    model, tokens = language_model(d_model=8), random_tokens(1, 10)
    ranked = probabilities(model, tokens, 4.0).sort(descending=True)
    four = ranked.values[:4] / ranked.values[:4].sum()
    top_p = (four[0] + four[1]).item() - 1e-6
    assert top_p > ranked.values[:3].sum().item(), "otherwise this shows nothing"
    found = sample(model, tokens, 2000, temperature=4.0, top_k=4, top_p=top_p)
    assert set(found.nonzero()[:, 0].tolist()) == set(ranked.indices[:2].tolist())


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-5}, {"temperature": 1e-44}], ids=str
)
def test_the_narrowest_choices_are_greedy(options: dict[str, Any]) -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    greedy = model.generate(tokens, max_new_tokens=10, temperature=0.0)
    assert torch.equal(model.generate(tokens, max_new_tokens=10, seed=1, **options), greedy)


@pytest.mark.parametrize(
    "options", [{"top_k": VOCABULARY}, {"top_k": 1000}, {"top_p": 1.0}, {"temperature": 1.0}], ids=str
)
def test_the_widest_choices_change_nothing(options: dict[str, Any]) -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    expected = model.generate(tokens, max_new_tokens=10, seed=1)
    assert torch.equal(model.generate(tokens, max_new_tokens=10, seed=1, **options), expected)


def test_a_seed_repeats_and_another_differs() -> None:
    model, tokens = language_model(d_model=8), random_tokens(2, 10)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 3.0}
    first = model.generate(tokens, seed=1, **options)
    torch.manual_seed(99)
    assert torch.equal(model.generate(tokens, seed=1, **options), first)
    assert not torch.equal(model.generate(tokens, seed=2, **options), first)


def test_a_seed_leaves_the_global_generator_alone() -> None:
    model, tokens = language_model(), random_tokens(2, 10)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.generate(tokens, seed=1, max_new_tokens=4)
    assert torch.equal(torch.rand(3), expected)


def test_without_a_seed_the_global_generator_decides() -> None:
    model, tokens = language_model(d_model=8), random_tokens(2, 10)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 3.0}
    torch.manual_seed(5)
    first = model.generate(tokens, **options)
    assert not torch.equal(model.generate(tokens, **options), first)
    torch.manual_seed(5)
    assert torch.equal(model.generate(tokens, **options), first)


@pytest.mark.parametrize("options", [{"temperature": 1e-50}, {"top_p": 1e-300}], ids=str)
def test_numbers_that_are_0_in_float32_choose_the_most_probable(options: dict[str, Any]) -> None:
    model, tokens = language_model(), random_tokens(3, 10)
    found = model.generate(tokens, max_new_tokens=5, seed=0, **options)
    assert torch.equal(found, model.generate(tokens, max_new_tokens=5, temperature=0.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(temperature: float) -> None:
    model = language_model()
    with torch.no_grad():
        model.trunk.blocks[0].ffn.up.weight[0] = float("nan")
    with pytest.raises(ValueError, match="the logits are not finite"):
        model.generate(random_tokens(1, 10), max_new_tokens=3, temperature=temperature)


def test_stop_tokens_of_prompts_in_32_bits() -> None:
    model, tokens = language_model(), random_tokens(1, 10).int()
    free = model.generate(tokens, max_new_tokens=3, temperature=0.0)
    stop = int(free[0, 11])
    found = model.generate(tokens, max_new_tokens=3, temperature=0.0, stop_tokens=[stop, VOCABULARY - 1])
    assert found.dtype == torch.int32
    assert torch.equal(found, free[:, : free[0, 10:].tolist().index(stop) + 11])
