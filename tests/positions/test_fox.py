"""FoX: gates are those of the formula and start as asked; their running sums in a cache are those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models.small import FOX_PRO, language_model, random_tokens, small_config
from trainshort.positions import Shape, build_position


def gates(
    x: Tensor, causal: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, Any]:
    """The module of one layer, and what it makes of x."""
    shape = Shape(d_model=x.shape[-1], num_heads=3, head_dim=8, causal=causal)
    module = build_position("fox", shape, options).gates()
    assert module is not None
    module.to(dtype)
    return module, module(x)


def formula(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.log(1 / (1 + torch.exp(-(x.double() @ weight.double().T + bias.double())))).transpose(1, 2)


def test_gates_are_those_of_the_formula() -> None:
    x = 30 * torch.randn(2, 40, 16)
    module, found = gates(x, gate_bias=1.5)
    torch.testing.assert_close(
        found.double(), formula(module.logits.weight, module.logits.bias, x), rtol=1e-5, atol=1e-6
    )
    assert found.shape == (2, 3, 40)


def test_encoders_have_another_map_for_later_keys() -> None:
    x = 30 * torch.randn(2, 40, 16)
    module, (past, future) = gates(x, causal=False)
    weight, bias = module.logits.weight, module.logits.bias
    torch.testing.assert_close(past.double(), formula(weight[:3], bias[:3], x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(future.double(), formula(weight[3:], bias[3:], x), rtol=1e-5, atol=1e-6)


def test_a_gate_next_to_one_is_not_one_in_16_bits() -> None:
    _, found = gates(torch.zeros(1, 4, 16, dtype=torch.bfloat16), dtype=torch.bfloat16, gate_bias=8.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((1, 3, 4), -3.354e-4), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("bias", [0.0, 5.0, -2.5])
def test_a_model_starts_with_the_gates_that_were_asked_for(bias: float) -> None:
    model = ts.LanguageModel(ts.ModelConfig(position="fox", position_options={"gate_bias": bias}, d_model=512))
    for block in model.trunk.blocks:
        logits = block.attention.gates.logits
        assert bool((logits.bias == bias).all())
        assert logits.weight.std().item() == pytest.approx(0.02, rel=0.1)
    one, two = (block.attention.gates.logits.weight for block in model.trunk.blocks[:2])
    assert not torch.equal(one, two), "each layer has its own"


def test_sums_in_a_cache_are_those_of_the_whole() -> None:
    """Whatever the pieces are, and with borders that nothing crosses."""
    torch.manual_seed(0)
    log_gates = -torch.rand(2, 4, 300).exp()
    log_gates[0, 1, [0, 5, 130]] = -torch.inf
    log_gates[1, 3, 299] = -torch.inf
    whole = ts.DecayBias(log_gates)
    for sizes in ([300], [1, 5, 128, 100, 66], [6, 124, 1, 1, 168]):
        cache = ts.KeyValueCache(small_config("fox"), 2)
        for part in log_gates.split(sizes, dim=2):
            cache.reserve(part.shape[2])
            found = cache.decay(0, part)
            cache.advance(part.shape[2])
        assert torch.equal(found.gate_first, whole.gate_first)
        torch.testing.assert_close(found.gate_sums, whole.gate_sums, rtol=1e-13, atol=0.0)
        assert bool((found.gate_sums.diff(dim=-1) <= 0).all()), "c rises"


def test_a_step_never_looks_at_gates_again() -> None:
    """Only the last sum counts: what stands before it may be anything."""
    cache = ts.KeyValueCache(small_config("fox"), 1)
    cache.decay(0, -torch.rand(1, 4, 9))
    cache.advance(9)
    last = cache.sums[0][:, :, 8].clone()
    cache.sums[0][:, :, :8] = torch.nan
    found = cache.decay(0, torch.full((1, 4, 1), -0.5)).gate_sums
    assert found is not None
    torch.testing.assert_close(found[:, :, -1], last - 0.5)


def test_a_padded_step_looks_at_the_last_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are refused are NaN to the end, so that the cost of looking does not grow with the text."""
    model, prompt = language_model("fox", num_kv_heads=2), random_tokens(2, 50)
    cache, looked_at = ts.KeyValueCache(model.config, 2), []
    is_nan = torch.isnan

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float64:
            looked_at.append(tensor.shape[-1])
        return is_nan(tensor)

    with torch.no_grad():
        model(prompt, cache=cache, key_padding_mask=torch.arange(50) >= torch.tensor([[0], [17]]))
        monkeypatch.setattr(torch, "isnan", counted)
        model(prompt[:, :1], cache=cache)
    assert looked_at
    assert max(looked_at) == 1


@pytest.mark.parametrize("position", ["fox", "alibi"])
def test_generation_with_and_without_a_cache(position: str) -> None:
    """With all parts of the published block, greedy, from a padded batch."""
    model, prompt = language_model(position, num_kv_heads=2, **FOX_PRO), random_tokens(2, 50)
    mask = torch.arange(50) >= torch.tensor([[0], [17]])
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "key_padding_mask": mask}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


def test_far_more_tokens_than_float32_could_sum() -> None:
    """A hundred thousand gates of a half: near tokens still differ by exactly theirs."""
    log_gates = torch.full((1, 1, 100_000), -0.6931472)
    bias = ts.DecayBias(log_gates)
    assert bias.gate_sums is not None
    near = (bias.gate_sums[..., -1] - bias.gate_sums[..., -2]).item()
    assert near == pytest.approx(float(log_gates[0, 0, 0]), rel=1e-9)
