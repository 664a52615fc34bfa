"""Patched models of transformers on a GPU: logits of the CPU, steps with a static cache, compiled generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainshort as ts

pytest.importorskip("transformers")

import transformers

from tests.integrations.stock import FAMILIES, MODELS, assert_same, padded, patched_like, stock_logits, tokens_of

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("name", ["bloom-11", "mpt-5-clipped", "falcon-6-multi_query", "falcon-6-grouped"])
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_logits_and_gradients(name: str, side: str) -> None:
    stock = MODELS[name]()
    tokens, mask = padded("left" if side == "none" else side, 300)
    if side == "none":
        mask = torch.ones_like(mask)
    expected = stock_logits(stock, tokens, mask)
    weights = torch.randn(expected.shape) * mask[..., None]
    (expected * weights).sum().backward()
    patched = ts.patch(MODELS[name]().cuda())
    found = patched(tokens.cuda(), attention_mask=mask.cuda()).logits
    assert_same(found.cpu()[mask], expected[mask], of=1e-4)
    (found * weights.cuda()).sum().backward()
    parameters = dict(stock.named_parameters())
    for name, parameter in patched.named_parameters():
        assert_same(parameter.grad.cpu(), parameters[name].grad, of=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    stock, tokens = FAMILIES[family](), tokens_of(2, 600)
    with torch.no_grad():
        expected = stock_logits(stock, tokens)
        found = ts.patch(FAMILIES[family]().cuda().bfloat16())(tokens.cuda()).logits.float().cpu()
    assert float((found - expected).std() / expected.std()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_with_a_static_cache(family: str, dtype: torch.dtype) -> None:
    """One token and several at a time after a long prompt with left padding, against the whole text at once."""
    patched = ts.patch(FAMILIES[family]().cuda().to(dtype))
    tokens, mask = (each.cuda() for each in padded("left", 700))
    past = transformers.StaticCache(config=patched.config, max_cache_len=800)
    found, end = [], 0
    with torch.no_grad():
        for size in (600, 1, 1, 8, 1, 89):
            begin, end = end, end + size
            options: dict[str, Any] = {"past_key_values": past, "use_cache": True}
            found.append(patched(tokens[:, begin:end], attention_mask=mask[:, :end], **options).logits)
        expected = patched(tokens, attention_mask=mask, use_cache=False).logits
    assert_same(torch.cat(found, dim=1)[mask], expected[mask], of=1e-4 if dtype == torch.float32 else 0.05)
    norms = past.layers[0].keys._trainshort_norms
    true = past.layers[0].keys.float().norm(dim=-1)[:, :, :768].unflatten(2, (-1, 128)).amax(-1)
    assert bool((norms.blocks[:, :, :6] >= true).all())
    assert bool((norms.blocks[:, :, :5] <= 1.001 * true[:, :, :5]).all())


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_the_cpu(family: str, cache: str, strategy: dict[str, Any]) -> None:
    stock = FAMILIES[family]()
    tokens, mask = padded("left", 40)
    options = {"max_new_tokens": 15, "do_sample": False, "use_cache": True, **strategy}
    expected = stock.generate(tokens, attention_mask=mask.long(), **options)
    patched = patched_like(stock).cuda()
    found = patched.generate(
        tokens.cuda(), attention_mask=mask.long().cuda(), cache_implementation=cache, disable_compile=True, **options
    )
    assert torch.equal(found.cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "padding"), [("bloom", True), ("falcon", False)])
def test_compiled_generation(family: str, padding: bool) -> None:
    """As transformers does it by itself on a GPU with a static cache: CUDA graphs of the compiled step."""
    stock = FAMILIES[family]()
    tokens, mask = padded("left", 100)
    if not padding:
        mask = torch.ones_like(mask)
    patched = patched_like(stock).cuda()
    options = {"attention_mask": mask.long().cuda(), "max_new_tokens": 40, "do_sample": False, "use_cache": True}
    expected = patched.generate(tokens.cuda(), **options)
    for _ in range(2):
        found = patched.generate(tokens.cuda(), cache_implementation="static", **options)
        assert torch.equal(found, expected)
