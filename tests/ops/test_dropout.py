"""Which weights dropout takes: as often as asked for, without a pattern, and the same whenever the seed is the same.

That backends drop the same weights as tests/ops/dense.py says, with the right gradients, is part of the contract
(the features of tests/ops/contract/features.py that begin with "dropout").
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import trainshort as ts
from trainshort.ops.dropout import factors, query_seeds

SHAPE = (2, 4, 256, 1024)  # rows, heads, queries, keys


def dropped(seed: int, p: float = 0.5, shape: tuple[int, int, int, int] = SHAPE) -> Tensor:
    """Which weights are dropped, as float32 [B, H, Tq, Tk]."""
    seeds = query_seeds(torch.tensor(seed), *shape[:3])
    return (factors(seeds, torch.arange(shape[3]), p, torch.float32) == 0).float()


def assert_chance(share: float, p: float, trials: int) -> None:
    """Within 5 standard deviations of what independent draws give: one run in two million fails by chance."""
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / trials), f"{share} of {trials} instead of {p}"


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1])
def test_as_many_as_asked_for(seed: int, p: float) -> None:
    found = dropped(seed, p)
    assert_chance(float(found.mean()), p, found.numel())
    for axis in range(4):  # in no row, head, query or key more than elsewhere
        others = [other for other in range(4) if other != axis]
        shares = found.mean(dim=others, dtype=torch.float64)
        worst = float(shares[(shares - p).abs().argmax()])
        assert_chance(worst, p, found.numel() // found.shape[axis])


@pytest.mark.parametrize("seed", [0, 12345, -(2**40)])
def test_neighbours_know_nothing_of_one_another(seed: int) -> None:
    """Pairs at every small distance along every axis, and along diagonals, differ half of the time."""
    found = dropped(seed)
    for axis in range(4):
        for step in (1, 2, 3, 4, 8, 16, 64, 128):
            if step < found.shape[axis]:
                count = found.shape[axis] - step
                differ = (found.narrow(axis, step, count) != found.narrow(axis, 0, count)).float()
                assert_chance(float(differ.mean()), 0.5, differ.numel())
    for step in (-3, -1, 1, 2, 16):
        low, high = max(0, -step), SHAPE[3] - max(0, step)
        differ = (found[:, :, 1:, low + step : high + step] != found[:, :, :-1, low:high]).float()
        assert_chance(float(differ.mean()), 0.5, differ.numel())


def test_patterns_of_eight_are_equally_frequent() -> None:
    """Of neighbouring keys, and of neighbouring queries: chi squared of 255 degrees of freedom."""
    for found in (dropped(7), dropped(7).transpose(2, 3)):
        bits = found.unflatten(3, (-1, 8)).long()
        pattern = (bits * 2 ** torch.arange(8)).sum(-1).flatten()
        counts = torch.bincount(pattern, minlength=256).double()
        expected = pattern.numel() / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) <= 5 * math.sqrt(2 * 255), chi


def test_rows_and_columns_span_everything() -> None:
    """A rank over two: patterns that are sums of those of rows and of columns would have a small one."""
    matrix = dropped(3, shape=(1, 1, 128, 128))[0, 0].bool()
    rank = 0
    for column in range(128):
        below = matrix[rank:, column].nonzero()
        if below.numel():
            pivot = rank + int(below[0])
            matrix[[rank, pivot]] = matrix[[pivot, rank]]
            others = matrix[:, column].clone()
            others[rank] = False
            matrix[others] ^= matrix[rank]
            rank += 1
    assert rank >= 122


@pytest.mark.parametrize("one", [0, 5, -1])
@pytest.mark.parametrize("other", [1, 2, 2**31, 2**32, -(2**63)])
def test_seeds_know_nothing_of_one_another(one: int, other: int) -> None:
    differ = (dropped(one) != dropped(one ^ other)).float()
    assert_chance(float(differ.mean()), 0.5, differ.numel())
    for axis in (0, 1, 2, 3):  # nor of one another's neighbours
        moved = (dropped(one) != dropped(one ^ other).roll(1, axis)).float()
        assert_chance(float(moved.mean()), 0.5, moved.numel())


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_probability_next_to_one_drops_all(backend: str) -> None:
    """Rounded to a whole one, nothing would be left to divide by."""
    q, k, v = random(1, 2, 20, 4)
    out = ts.alibi_attention(q, k, v, dropout=1.0 - 1e-12, seed=1, backend=backend)
    assert not bool(out.any())
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not bool(gradient.any())


def random(*shape: int, **about: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_the_mean_over_seeds_is_attention_without_dropout(backend: str) -> None:
    q, k, v = (t.detach() for t in random(1, 2, 20, 4))
    outs = torch.stack([ts.alibi_attention(q, k, v, dropout=0.5, seed=seed, backend=backend) for seed in range(2000)])
    error = (outs.mean(0) - ts.alibi_attention(q, k, v)).abs()
    assert bool((error <= 5 * outs.std(0) / math.sqrt(2000) + 1e-6).all())


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_without_a_seed_torch_draws_one(backend: str) -> None:
    q, k, v = random(1, 2, 50, 8)
    torch.manual_seed(1)
    one, two = (ts.alibi_attention(q, k, v, dropout=0.2, backend=backend) for _ in range(2))
    torch.manual_seed(1)
    again = ts.alibi_attention(q, k, v, dropout=0.2, backend=backend)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


def test_no_dropout_draws_nothing() -> None:
    q, k, v = random(1, 2, 50, 8)
    before = torch.get_rng_state()
    plain = ts.alibi_attention(q, k, v)
    for nothing in (0, 0.0, 1e-11):
        assert torch.equal(ts.alibi_attention(q, k, v, dropout=nothing), plain)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_drops_the_same_again(reentrant: bool) -> None:
    q, k, v = random(1, 2, 200, 8)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ts.alibi_attention(q, k, v, dropout=0.3)

    torch.manual_seed(3)
    expected = torch.autograd.grad(compute(q, k, v).square().sum(), [q, k, v])
    torch.manual_seed(3)
    out = checkpoint(compute, q, k, v, use_reentrant=reentrant)
    torch.manual_seed(99)
    out.square().sum().backward()
    for leaf, gradient in zip((q, k, v), expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_a_seed_in_a_tensor_is_the_same_seed() -> None:
    q, k, v = random(2, 2, 150, 8)
    given = (7, torch.tensor(7), torch.tensor([[7]]), torch.arange(9)[7:8])
    outs = [ts.alibi_attention(q, k, v, dropout=0.3, seed=seed) for seed in given]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_compiled_once_for_all_seeds() -> None:
    q, k, v = random(1, 2, 150, 8)
    compiles = CompileCounterWithBackend("aot_eager")
    compute = torch.compile(
        lambda q, seed: ts.alibi_attention(q, k, v, dropout=0.3, seed=seed), fullgraph=True, backend=compiles
    )
    for number in (1, 2, 2**40):
        seed = torch.tensor(number)
        found, expected = compute(q, seed), ts.alibi_attention(q, k, v, dropout=0.3, seed=seed)
        assert torch.equal(found, expected)
        one, two = (torch.autograd.grad(out.sum(), q)[0] for out in (found, expected))
        assert torch.equal(one, two)
    assert compiles.frame_count == 1
    drawn = torch.compile(lambda q: ts.alibi_attention(q, k, v, dropout=0.3), fullgraph=True, backend="aot_eager")
    assert not torch.equal(drawn(q), drawn(q))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout": 1.0}, ValueError, r"\[0, 1\).*got 1.0"),
        ({"dropout": -0.1}, ValueError, r"\[0, 1\)"),
        ({"dropout": math.nan}, ValueError, "finite"),
        ({"dropout": "0.1"}, TypeError, "dropout must be a number"),
        ({"dropout": True}, TypeError, "dropout must be a number"),
        ({"dropout": 0.1, "seed": 0.5}, TypeError, "seed must be an int"),
        ({"dropout": 0.1, "seed": True}, TypeError, "seed must be an int"),
        ({"dropout": 0.1, "seed": 2**63}, ValueError, "64 bits"),
        ({"dropout": 0.1, "seed": torch.tensor([1, 2])}, ValueError, "one int64"),
        ({"dropout": 0.1, "seed": torch.tensor(1.0)}, ValueError, "one int64"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = random(1, 2, 10, 8)
    with pytest.raises(error, match=message):
        ts.alibi_attention(q, k, v, **arguments)


def test_paths_that_have_none_say_so() -> None:
    q, k, v = (t.detach() for t in random(1, 2, 50, 8))
    explained = ts.explain(q, k, v, dropout=0.1)
    assert explained.path == "blocked"
    assert "dropout" in explained.why_not["sdpa"]
    step = ts.explain(
        q[:, :, :1], k, v, bias=ts.LinearBias(ts.alibi_slopes(2)), key_norms=torch.ones(1, 2) * 99, dropout=0.1
    )
    assert "dropout" in step.why_not["blocked decoding"]
