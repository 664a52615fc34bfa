"""ALiBi as a position method: the paper's slopes, learned slopes, slopes of a part of the heads, one-sided heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models.small import language_model, random_tokens
from trainshort.positions import Shape, build_position
from trainshort.positions.alibi import LOG_RANGE, Alibi


def alibi(heads: int = 4, *, causal: bool = True, **options) -> Alibi:
    position = build_position("alibi", Shape(d_model=8 * heads, num_heads=heads, head_dim=8, causal=causal), options)
    assert isinstance(position, Alibi)
    return position


def slopes_of(position: Alibi) -> Tensor:
    bias = position.bias()
    assert isinstance(bias, ts.LinearBias)
    return bias.slopes


def paper_slopes(heads: int) -> list[float]:
    """Geometric for a power of two; otherwise every second slope of the next one fills up the rest."""
    closest = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8.0 * (head + 1) / closest) for head in range(closest)]
    rest = [2.0 ** (-8.0 * (2 * head + 1) / (2 * closest)) for head in range(heads - closest)]
    return first + rest


def dense_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sees: list[str]) -> Tensor:
    """softmax(q.k / sqrt(D) - slope |i - j|) v in float64, each head looking its way."""
    q, k, v = q.double(), k.double(), v.double()
    index = torch.arange(q.shape[2])
    ahead = index[None, :] - index[:, None]  # key - query
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) - slopes.double()[:, None, None] * ahead.abs()
    hidden = {"past": ahead > 0, "future": ahead < 0, "both": torch.zeros_like(ahead, dtype=torch.bool)}
    scores = scores.masked_fill(torch.stack([hidden[way] for way in sees]), -math.inf)
    return scores.softmax(-1) @ v


def normal(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((3, *shape), generator=generator).unbind(0)


# Fixed slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 40])
def test_the_slopes_are_the_papers(heads: int) -> None:
    slopes = slopes_of(alibi(heads))
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(paper_slopes(heads)), rtol=1e-6, atol=0.0)


def test_fixed_slopes_are_no_parameters_and_not_stored() -> None:
    position = alibi()
    assert list(position.parameters()) == []
    assert position.state_dict() == {}
    assert position.max_length is None


def test_a_model_stores_no_slopes_and_nothing_that_grows_with_length() -> None:
    config = ts.ModelConfig(d_model=24, num_heads=3, num_layers=2, vocab_size=19)
    model = ts.LanguageModel(config)
    before = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for length in (5, 210):
        model(torch.randint(19, (1, length)))
    after = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert after == before
    assert not [name for name in after if "slope" in name or "position" in name]
    kept = [*model.buffers(), *model.parameters()]
    assert not [tensor.shape for tensor in kept if {5, 210} & set(tensor.shape)]


def test_attention_is_the_formula() -> None:
    q, k, v = normal(2, 3, 300, 8)
    out = ts.attention(q, k, v, bias=alibi(3).bias())
    expected = dense_attention(q, k, v, torch.tensor(paper_slopes(3)), ["past"] * 3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_slopes_stay_exact_when_the_model_is_cast_to_16_bits(dtype: torch.dtype) -> None:
    """Rounded to bfloat16, a slope of 2^-0.5 is off by 0.3%: thirty units at distance ten thousand."""
    exact = slopes_of(alibi(12)).clone()
    position = alibi(12).to(dtype)
    assert slopes_of(position).dtype == torch.float32
    assert torch.equal(slopes_of(position), exact)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to(torch.bfloat16),
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float16),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "there_and_back": lambda module: module.bfloat16().float(),
    "type": lambda module: module.type(torch.bfloat16),
}


@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "fixed"])
@pytest.mark.parametrize("cast", CASTS)
def test_slopes_stay_float32_whatever_the_model_is_cast_to(cast: str, trainable: bool) -> None:
    model = ts.LanguageModel(ts.ModelConfig(num_heads=12, d_model=24, position_options={"trainable": trainable}))
    assert isinstance(model.position, Alibi)
    exact = slopes_of(model.position).clone()
    moved = CASTS[cast](model)
    assert moved.position is model.position
    stored = model.position.log_slopes if trainable else model.position.slopes
    assert stored.dtype == torch.float32
    assert torch.equal(slopes_of(model.position), exact)


def test_gradients_of_trainable_slopes_stay_float32_with_them() -> None:
    position = alibi(12, trainable=True)
    slopes_of(position).sum().backward()
    gradient = position.log_slopes.grad
    assert gradient is not None
    before = gradient.clone()
    position.bfloat16()
    assert position.log_slopes.grad is not None
    assert position.log_slopes.grad.dtype == torch.float32
    assert torch.equal(position.log_slopes.grad, before)
    torch.optim.SGD(position.parameters(), lr=0.1).step()


@pytest.mark.parametrize("assign", [False, True])
def test_slopes_stay_float32_when_a_state_in_16_bits_is_loaded(assign: bool) -> None:
    config = ts.ModelConfig(num_heads=12, d_model=24, position_options={"trainable": True})
    model = ts.LanguageModel(config)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert isinstance(model.position, Alibi)
    assert model.position.log_slopes.dtype == torch.float32
    assert model.position.log_slopes.requires_grad
    assert model.trunk.embedding.weight.dtype == (torch.bfloat16 if assign else torch.float32)


def test_trainable_slopes_on_the_meta_device_keep_their_dtype() -> None:
    with torch.device("meta"):
        position = alibi(4, trainable=True)
    assert position.bfloat16().log_slopes.dtype == torch.float32
    assert position.to_empty(device="cpu").log_slopes.dtype == torch.float32


def test_scale_multiplies_every_slope() -> None:
    torch.testing.assert_close(slopes_of(alibi(6, scale=0.125)), 0.125 * slopes_of(alibi(6)))
    local = alibi(2, slopes=[0.5, 0.25], scale=3.0)
    assert torch.equal(slopes_of(local), torch.tensor([1.5, 0.75]))


# Slopes of a part of the heads


def test_given_slopes_are_those_heads_of_the_full_model() -> None:
    full = slopes_of(alibi(6))
    q, k, v = normal(1, 6, 200, 8)
    out = ts.attention(q, k, v, bias=alibi(6).bias())
    for first, end in ((0, 2), (2, 5), (5, 6)):
        part = alibi(end - first, slopes=full[first:end].tolist())
        heads = slice(first, end)
        local = ts.attention(q[:, heads], k[:, heads], v[:, heads], bias=part.bias())
        torch.testing.assert_close(local, out[:, heads], rtol=1e-6, atol=1e-6)
        own = ts.attention(q[:, heads], k[:, heads], v[:, heads], bias=alibi(end - first).bias())
        assert not torch.allclose(own, out[:, heads], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slopes": [0.5, 0.25]}, "each of 4 heads, got 2"),
        ({"slopes": [0.5, 0.25, 0.0, 0.1], "trainable": True}, "heads of slope 0 cannot learn"),
        ({"biased_heads": 3, "trainable": True}, "heads of slope 0 cannot learn"),
        ({"biased_heads": 5}, "biased_heads must be at most the 4 heads"),
        ({"biased_heads": 2, "slopes": [0.5, 0.25, 0.5, 0.1]}, "slopes not be given"),
        ({"scaling": "cubic"}, "alibi scaling must be one of none, linear, ntk; got 'cubic'"),
        ({"scaling": "linear"}, "alibi scaling 'linear' needs a factor, or trained_length"),
        ({"factor": 2.0}, "factor and trained_length belong to a scaling"),
        ({"scaling": "ntk", "factor": -2.0}, "factor must be positive, got -2.0"),
        ({"slopes": [0.5, 0.25, -0.5, 0.1]}, "must be 0 or positive, got -0.5"),
        ({"slopes": [0.5, 0.25, math.nan, 0.1]}, "slopes must be 0 or positive"),
        ({"slopes": [0.5, 0.25, math.inf, 0.1]}, "slopes must be 0 or positive"),
        ({"slopes": [0.5, 0.25, 1e-60, 0.1]}, "must be 0 or positive, got 1e-60 .*float32 holds"),
        ({"slopes": [0.5, 0.25, 1e60, 0.1]}, r"must be 0 or positive, got 1e\+60 .*float32 holds"),
        ({"slopes": [0.5, 0.25, 1e-30, 0.1], "scale": 1e-30}, "got 1e-30 times scale 1e-30"),
        ({"scale": -1.0}, "must be 0 or positive"),
        ({"scale": 0.0}, "got 0.00390625 times scale 0.0"),
        ({"one_sided": True}, "one_sided is for encoders"),
    ],
)
def test_slopes_that_cannot_be_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        alibi(4, **options)


# Longer texts than those of the training


def stretched(length: int, heads: int = 4, **options: Any) -> list[float]:
    position = alibi(heads, **options).at_length(length)
    assert isinstance(position, Alibi)
    return slopes_of(position).tolist()


@pytest.mark.parametrize(("length", "factor"), [(1, 1.0), (100, 1.0), (101, 1.01), (800, 8.0)])
def test_slopes_by_the_length_of_the_text(length: int, factor: float) -> None:
    expected = [slope / factor for slope in paper_slopes(4)]
    assert stretched(length, scaling="linear", trained_length=100) == pytest.approx(expected)


def test_the_steepest_head_keeps_its_slope_and_the_gentlest_takes_the_factor() -> None:
    """Also for six heads, whose slopes do not fall from head to head."""
    found = stretched(1, heads=6, scaling="ntk", factor=4.0)
    ordered = sorted(range(6), key=lambda head: -paper_slopes(6)[head])
    for place, head in enumerate(ordered):
        assert found[head] == pytest.approx(paper_slopes(6)[head] / 4.0 ** (place / 5))


def test_a_method_for_one_length_does_not_change_another() -> None:
    position = alibi(4, scaling="linear", trained_length=100)
    longer = position.at_length(400)
    assert isinstance(longer, Alibi)
    assert slopes_of(position).tolist() == pytest.approx(paper_slopes(4))
    assert slopes_of(longer).tolist() == pytest.approx([slope / 4 for slope in paper_slopes(4)])
    assert position.at_length(100) is position


def test_the_length_is_that_of_the_longest_document() -> None:
    options = {"scaling": "linear", "trained_length": 40}
    model, tokens = language_model(position_options=options), random_tokens(1, 120)
    packed = model(tokens, cu_seqlens=torch.tensor([0, 40, 80, 120]))
    alone = torch.cat([model(part) for part in tokens.split(40, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_a_cache_as_long_as_the_text_knows_its_length() -> None:
    model, tokens = (
        language_model(position_options={"scaling": "linear", "trained_length": 40}),
        random_tokens(1, 120),
    )
    cache = model.make_cache(1, 120)
    with torch.no_grad():
        found = torch.cat([model(part, cache=cache) for part in tokens.split([50, 1, 69], dim=1)], dim=1)
        torch.testing.assert_close(found, model(tokens), rtol=2e-5, atol=2e-4)


def test_heads_without_a_slope_in_a_cache() -> None:
    """Long enough that the others skip keys, a piece and a token at a time."""
    options = {"slopes": [0.0, 0.9, 0.0, 0.5]}
    model, tokens = language_model(position_options=options, num_kv_heads=2), random_tokens(1, 1500)
    cache = model.make_cache(1)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split([1300, 197, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"biased_heads": 2}, "head of slope 0"), ({"scaling": "linear", "trained_length": 9}, "stay as they are")],
)
def test_a_bounded_cache_says_what_it_needs(options: dict[str, Any], match: str) -> None:
    model = language_model(position_options=options)
    with pytest.raises(ValueError, match=match), torch.no_grad():
        model(random_tokens(1, 5), cache=model.make_cache(1, bounded=True))


# Trainable slopes


def test_trainable_slopes_start_where_the_paper_has_them() -> None:
    position = alibi(6, trainable=True)
    torch.testing.assert_close(slopes_of(position).detach(), torch.tensor(paper_slopes(6)), rtol=1e-6, atol=0.0)
    assert [tuple(parameter.shape) for parameter in position.parameters()] == [(6,)]
    assert list(position.state_dict()) == ["log_slopes"]


def test_the_gradient_of_trainable_slopes_is_that_of_the_formula() -> None:
    q, k, v = normal(1, 4, 150, 8)
    upstream = torch.randn(1, 4, 150, 8, generator=torch.Generator().manual_seed(1))
    position = alibi(4, trainable=True)
    ts.attention(q, k, v, bias=position.bias()).backward(upstream)
    found = position.log_slopes.grad
    assert found is not None
    log_slopes = torch.tensor(paper_slopes(4), dtype=torch.float64).log().requires_grad_()
    dense_attention(q, k, v, log_slopes.exp(), ["past"] * 4).backward(upstream.double())
    assert log_slopes.grad is not None
    torch.testing.assert_close(found.double(), log_slopes.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [1.0, 10.0, 1000.0])
def test_trainable_slopes_stay_positive_after_a_large_step(step: float) -> None:
    """Whatever the optimizer does, the next forward pass has slopes that attention can use."""
    position = alibi(4, trainable=True)
    optimizer = torch.optim.SGD(position.parameters(), lr=step)
    position.log_slopes.grad = torch.tensor([1.0, -1.0, 0.3, -0.3])
    optimizer.step()
    slopes = slopes_of(position).detach()
    assert bool((slopes > 0).all())
    assert bool(torch.isfinite(slopes).all())
    q, k, v = normal(1, 4, 40, 8)
    assert bool(torch.isfinite(ts.attention(q, k, v, bias=position.bias())).all())


@pytest.mark.parametrize("start", [-1e30, -1000.0, -31.0, 21.0, 1000.0, 1e30])
def test_the_gradient_passes_beyond_the_range_of_slopes(start: float) -> None:
    """It is the gradient at the border of the range, where the slope is held."""
    position = alibi(4, trainable=True)
    with torch.no_grad():
        position.log_slopes[1] = start
    slopes = slopes_of(position)
    border = math.exp(LOG_RANGE[0] if start < 0 else LOG_RANGE[1])
    assert slopes[1].item() == pytest.approx(border, rel=1e-6, abs=0.0)
    (slopes * torch.tensor([1.0, 5.0, 1.0, 1.0])).sum().backward()
    assert position.log_slopes.grad is not None
    assert position.log_slopes.grad[1].item() == pytest.approx(5 * border, rel=1e-6, abs=0.0)


def test_attention_has_a_gradient_for_a_slope_below_the_range() -> None:
    position = alibi(1, trainable=True)
    with torch.no_grad():
        position.log_slopes.fill_(-50.0)
    q, k, v = normal(1, 1, 60, 8)
    ts.attention(q, k, v, bias=position.bias()).square().sum().backward()
    assert position.log_slopes.grad is not None
    assert position.log_slopes.grad.item() != 0.0


@pytest.mark.parametrize("start", [-45.0, 35.0])
def test_a_slope_thrown_out_of_the_range_comes_back(start: float) -> None:
    position = alibi(4, trainable=True)
    with torch.no_grad():
        position.log_slopes.fill_(start)
    optimizer = torch.optim.SGD(position.parameters(), lr=0.2)
    for _ in range(60):
        optimizer.zero_grad()
        (slopes_of(position).log() - math.log(0.25)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(slopes_of(position).detach(), torch.full((4,), 0.25), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("start", [-math.inf, math.inf])
def test_even_infinite_logarithms_are_slopes(start: float) -> None:
    position = alibi(4, trainable=True)
    with torch.no_grad():
        position.log_slopes[2] = start
    slopes = slopes_of(position).detach()
    assert bool((slopes > 0).all())
    assert bool(torch.isfinite(slopes).all())


def test_training_moves_the_slopes() -> None:
    torch.manual_seed(0)
    config = ts.ModelConfig(
        position_options={"trainable": True}, d_model=32, num_heads=4, num_layers=2, vocab_size=31
    )
    model = ts.LanguageModel(config)
    assert isinstance(model.position, Alibi)
    before = slopes_of(model.position).detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(31, (2, 50))
    for _ in range(5):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    after = slopes_of(model.position).detach()
    assert bool((after > 0).all())
    assert bool(((after - before).abs() > 1e-3 * before).all())


# One-sided heads


@pytest.mark.parametrize("heads", [2, 4, 5])
def test_one_sided_heads_look_one_way(heads: int) -> None:
    q, k, v = normal(2, heads, 150, 8)
    out = ts.attention(q, k, v, bias=alibi(heads, causal=False, one_sided=True).bias(), causal=False)
    past = (heads + 1) // 2
    sees = ["past"] * past + ["future"] * (heads - past)
    expected = dense_attention(q, k, v, torch.tensor(paper_slopes(heads)), sees)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_encoders_look_both_ways_by_default() -> None:
    q, k, v = normal(2, 3, 150, 8)
    out = ts.attention(q, k, v, bias=alibi(3, causal=False).bias(), causal=False)
    expected = dense_attention(q, k, v, torch.tensor(paper_slopes(3)), ["both"] * 3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_one_sided_slopes_can_be_trained() -> None:
    position = alibi(4, causal=False, one_sided=True, trainable=True)
    q, k, v = normal(1, 4, 60, 8)
    ts.attention(q, k, v, bias=position.bias(), causal=False).square().sum().backward()
    assert position.log_slopes.grad is not None
    assert bool((position.log_slopes.grad != 0).all())
