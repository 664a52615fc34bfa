"""DecayBias: what it is made from, what it refuses, and that it means what it says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.budget import Judge
from tests.ops.cases import BACKENDS, random_case, random_gates, random_times
from tests.ops.dense import Case
from trainshort.ops.gate_sums import running_sums, running_sums_ahead

backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(length: int = 40, heads: int = 2, batch: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn((batch, heads, length, dim), generator=generator) for _ in range(3))
    return q, k, v


@backends
def test_constant_gates_are_alibi(backend: str) -> None:
    q, k, v = inputs(300)
    slopes = torch.tensor([0.25, 0.03])
    gates = -slopes[None, :, None].expand(1, -1, 300)
    expected = ts.alibi_attention(q, k, v, slopes, backend=backend)
    for bias in (ts.DecayBias(gates), ts.DecayBias.at(torch.arange(300), slopes)):
        torch.testing.assert_close(ts.attention(q, k, v, bias=bias, backend=backend), expected)
    both = ts.alibi_attention(q, k, v, slopes, causal=False, backend=backend)
    for bias in (ts.DecayBias(gates, future=gates), ts.DecayBias.at(torch.arange(300), slopes)):
        torch.testing.assert_close(ts.attention(q, k, v, bias=bias, causal=False, backend=backend), both)


@backends
def test_what_a_gate_acts_on(backend: str) -> None:
    """On every link from before its token to it or later; the first gate on none."""
    q, k, v = inputs(6)
    gates = torch.zeros(1, 2, 6)
    plain = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    gates[..., 0] = -3.0
    assert torch.equal(ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend), plain)
    gates[..., 3] = -3.0
    out = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    assert torch.equal(out[:, :, :3], plain[:, :, :3])
    scores = q @ k.transpose(-2, -1) / 8**0.5
    scores[..., 3:, :3] -= 3.0
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v)


@backends
@pytest.mark.parametrize("value", [-torch.inf, -1e300])
def test_nothing_crosses_a_closed_gate(backend: str, value: float) -> None:
    q, k, v = inputs(300)
    gates = random_gates(2, 2, 300).double()
    gates[:, :, 170] = value
    gates.requires_grad_()
    out = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    alone = ts.attention(
        *(t[:, :, 170:] for t in (q, k, v)), bias=ts.DecayBias(gates[:, :, 170:].detach()), backend=backend
    )
    torch.testing.assert_close(out[:, :, 170:], alone)
    out.square().sum().backward()
    assert gates.grad is not None
    assert torch.isfinite(gates.grad).all()
    assert bool((gates.grad[:, :, [0, 170]] == 0).all())
    assert bool((gates.grad[:, :, [1, 169, 171, 299]] != 0).all())


@backends
@pytest.mark.parametrize("value", [-(2.0**20), -1e7, -1e9, -1e12, -1e17, -3e38])
def test_gates_that_are_nearly_closed(backend: str, value: float) -> None:
    """They hide what is in front of them, and cost the tokens behind them no digit: against a sum for each link."""
    q, k, v = (tensor.double() for tensor in inputs(120))
    gates = torch.full((1, 2, 120), -0.1, dtype=torch.float64)
    gates[..., 10:40] = gates[..., 80] = value
    gates.requires_grad_()
    place = torch.arange(120)
    crossed = (place > place[:, None]) & (place <= place[:, None, None])  # [i, j, token]: after j, up to i
    bias = (crossed * gates[:, :, None, None]).sum(-1)
    scores = (q @ k.transpose(-2, -1) / 8**0.5 + bias).masked_fill(place > place[:, None], -torch.inf)
    truth = torch.softmax(scores, -1) @ v
    out = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    is_number = value == -(2.0**20)  # 31 of which are in the sum
    rounding = 1e-6 if is_number else 1e-12
    torch.testing.assert_close(out, truth, rtol=0.0, atol=rounding)
    found, expected = (torch.autograd.grad(each.square().sum(), gates)[0] for each in (out, truth))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=100 * rounding)
    assert is_number or bool((found[gates == value] == 0).all())


def test_no_low_gate_enters_a_sum() -> None:
    """In one piece, in pieces as a cache has them, and for later keys."""
    gates = torch.full((1, 1, 60), -0.5)
    gates[..., [7, 30]] = -1e9
    whole, first = running_sums(gates)
    pieces = [running_sums(gates[..., :20])]
    for begin in (20, 40):
        before = tuple(each[..., -1:] for each in pieces[-1])
        pieces.append(running_sums(gates[..., begin : begin + 20], before, begin))
    for found, expected in zip(zip(*pieces, strict=True), (whole, first), strict=True):
        assert torch.equal(torch.cat(found, dim=-1), expected)
    assert float(whole[..., -1]) == -0.5 * 57
    assert first[0, 0, [6, 7, 29, 30]].tolist() == [0, 7, 7, 30]
    ahead, end = running_sums_ahead(gates)
    assert torch.equal(ahead, whole)
    assert end[0, 0, [6, 7, 29, 30]].tolist() == [7, 30, 30, 60]


@backends
def test_gates_that_close_and_never_open(backend: str) -> None:
    q, k, v = inputs(200)
    gates = torch.full((1, 2, 200), -torch.inf)
    torch.testing.assert_close(ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend), v)
    both = ts.attention(q, k, v, bias=ts.DecayBias(gates, future=gates), causal=False, backend=backend)
    torch.testing.assert_close(both, v)


@backends
def test_nothing_leaks_across_a_border(backend: str) -> None:
    """Keys that no query sees may hold anything: queries before the border are left out."""
    q, k, v = inputs(300)
    gates = torch.zeros(1, 2, 300)
    gates[..., 150] = -torch.inf
    few = q[:, :, 160:]
    clean = ts.attention(few, k, v, bias=ts.DecayBias(gates), backend=backend)
    for tensor in (k, v):
        tensor[:, :, :20] = torch.nan
    assert torch.equal(ts.attention(few, k, v, bias=ts.DecayBias(gates), backend=backend), clean)


def test_sums_never_rise() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 6.0 + 6.0 * torch.randn((1, 1, 65_536), generator=generator, dtype=torch.float64)
    bias = ts.DecayBias(torch.nn.functional.logsigmoid(logits))
    assert bias.gate_sums is not None
    assert bool((bias.gate_sums.diff(dim=-1) <= 0).all())


def test_differences_are_exact_at_a_million_tokens() -> None:
    """The bias of near tokens, 2^20 tokens into a text, in a head that forgets by half a nat a token."""
    gates = -0.5 - torch.rand((1, 1, 2**20), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = ts.DecayBias(gates)
    last = torch.arange(2**20 - 64, 2**20)
    found = bias.between(last[None, None, :, None], last[None, None, None], torch.float32)[0, 0]
    near = gates[0, 0, -64:].clone()
    near[0] = 0.0
    exact = near.cumsum(0)[:, None] - near.cumsum(0)
    assert float((found.double() - exact).abs().max()) <= 2.0**-24 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_times_keep_their_digits(dtype: torch.dtype) -> None:
    """Nanoseconds since 1970 and seconds with nine decimals: float32 would round them to 128 seconds."""
    unit = 1 if dtype == torch.int64 else 1e-6
    times = (torch.tensor([0, 0, 1, 3, 1000]) * unit).to(dtype) + (
        1_790_000_000 if unit != 1 else 1_790_000_000 * 10**9
    )
    bias = ts.DecayBias.at(times, torch.ones(1) / unit)
    index = torch.arange(5)
    found = bias.between(index[None, None, :, None], index[None, None, None], torch.float32)[0, 0]
    expected = -(
        torch.tensor([0.0, 0.0, 1.0, 3.0, 1000.0])[:, None] - torch.tensor([0.0, 0.0, 1.0, 3.0, 1000.0])
    ).abs()
    torch.testing.assert_close(found, expected, atol=0.5 if unit != 1 else 0.0, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32], ids=str)
def test_short_integers_may_lie_far_apart(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    bias = ts.DecayBias.at(torch.tensor([limits.min, 0, limits.max], dtype=dtype), torch.ones(1))
    assert bias.times is not None
    assert bias.times.tolist() == [[0.0, float(-limits.min), float(limits.max - limits.min)]]


@backends
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_integers_without_a_sign_that_go_back_are_refused(dtype: torch.dtype, backend: str) -> None:
    """They would turn round, and 3 after 5 would be 254 later."""
    q = torch.zeros(1, 1, 2, 4)
    bias = ts.DecayBias.at(torch.tensor([5, 3], dtype=torch.int64).to(dtype), torch.ones(1))
    with pytest.raises(ValueError, match="the one at position 1 goes back"):
        ts.attention(q, q, q, bias=bias, backend=backend)


def gates_gradient(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, gates: Tensor) -> Tensor:
    """The gradient of log gates [T] of one head, q, k, v and upstream [T, D], all in float64, block by block. Keys
    whose bias is below -100 are left out: they weigh nothing in float64 either."""
    length, dim = q.shape
    level = gates.clone()
    level[0] = 0.0
    level = level.cumsum(0)
    by_token = torch.zeros_like(level)
    for begin in range(0, length, 1024):
        rows = slice(begin, begin + 1024)
        first = int(torch.searchsorted(-level, -level[begin] - 100.0))
        keys = slice(first, min(begin + 1024, length))
        later = (
            torch.arange(keys.start, keys.stop, device=q.device) > torch.arange(length, device=q.device)[rows, None]
        )
        scores = q[rows] @ k[keys].T / dim**0.5 + level[rows, None] - level[keys]
        weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
        dweights = upstream[rows] @ v[keys].T
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        by_token[rows] += dscores.sum(-1)
        by_token[keys] -= dscores.sum(0)
    gradient = by_token.flip(0).cumsum(0).flip(0)
    gradient[0] = 0.0
    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_65536_gates(dtype: torch.dtype, offset: float) -> None:
    """In 16 bits within half a percent. In float32 what as many roundings sum up to, which go one way and the other:
    a suffix sum of row sums less column sums keeps those of all later tokens."""
    generator = torch.Generator().manual_seed(0)
    length = 65_536
    q, k, v, upstream = torch.randn((4, 1, 1, length, 8), generator=generator).to(dtype).unbind(0)
    logits = torch.randn((1, 1, length), generator=generator) + offset
    gates = torch.nn.functional.logsigmoid(logits).requires_grad_()
    out = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend="blocked")
    (found,) = torch.autograd.grad(out, gates, upstream)
    exact = gates_gradient(*(tensor[0, 0].detach().double() for tensor in (q, k, v, upstream, gates)))
    error = (found[0, 0].double() - exact).norm() / exact.norm()
    allowed = 0.005 if dtype == torch.bfloat16 else 4 * 2.0**-24 * length**0.5
    assert float(error) <= allowed, f"{float(error):.2e}"


@backends
def test_half_gates_mean_what_they_hold(backend: str) -> None:
    q, k, v = inputs(50)
    gates = random_gates(2, 2, 50).bfloat16()
    low = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    assert torch.equal(low, ts.attention(q, k, v, bias=ts.DecayBias(gates.double()), backend=backend))


@backends
def test_a_cache_that_grows(backend: str) -> None:
    """A step of decoding with the gates of all tokens so far is a row of the whole."""
    q, k, v = inputs(300)
    gates = random_gates(2, 2, 300)
    whole = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend=backend)
    for length in (1, 130, 300):
        step = ts.attention(
            q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length],
            bias=ts.DecayBias(gates[..., :length]), key_norms=k[:, :, :length].norm(dim=-1), backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(step, whole[:, :, length - 1 : length])
        inside = ts.attention(
            q[:, :, length - 1 : length], k, v, bias=ts.DecayBias(gates), query_start=length - 1, backend=backend
        )
        torch.testing.assert_close(inside, whole[:, :, length - 1 : length])


@backends
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_each_document_has_times_of_its_own(dtype: torch.dtype, backend: str) -> None:
    """In any order of documents, and whatever they begin with: as if each were alone."""
    q, k, v = (tensor.double() for tensor in inputs(300, batch=1))
    starts = [0, 0, 90, 91, 200, 300, 300]
    first = [3, 1_790_000_000_000_000_000, 10**15, -(10**18), 7]
    steps = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(1)).cumsum(0)
    unit = 1 if dtype == torch.int64 else 1e-9
    spans = [slice(a, b) for a, b in itertools.pairwise(starts)]
    times = torch.cat(
        [(begin + steps[span]).to(dtype) * unit for begin, span in zip([0, *first], spans, strict=True)]
    )
    times = times.to(dtype)
    slopes = torch.tensor([0.3, 0.01], dtype=torch.float64).requires_grad_()
    for causal in (True, False):
        options = {"causal": causal, "backend": backend}
        bias = ts.DecayBias.at(times, slopes)
        out = ts.attention(q, k, v, bias=bias, cu_seqlens=torch.tensor(starts), **options)
        alone = [
            ts.attention(
                q[:, :, own], k[:, :, own], v[:, :, own], bias=ts.DecayBias.at(times[own], slopes), **options
            )
            for own in spans
        ]
        together = torch.cat(alone, dim=2)
        torch.testing.assert_close(out, together, rtol=0.0, atol=1e-12)
        found, expected = (torch.autograd.grad(each.square().sum(), slopes)[0] for each in (out, together))
        torch.testing.assert_close(found, expected)
    bad = times.clone()
    bad[250] -= 10**6 if dtype == torch.int64 else 1e9
    with pytest.raises(ValueError, match=r"never go back.*the one at position 250 goes back"):
        ts.attention(q, k, v, bias=ts.DecayBias.at(bad, slopes), cu_seqlens=torch.tensor(starts), backend=backend)
    with pytest.raises(ValueError, match=r"never go back.*the one at position 91 goes back"):
        ts.attention(q, k, v, bias=ts.DecayBias.at(times, slopes), backend=backend)


def test_times_of_documents_that_no_integer_holds() -> None:
    """Each document for itself is fine, their sum is not."""
    q = torch.zeros(1, 1, 6, 4)
    bias = ts.DecayBias.at(torch.tensor([0, 2**62] * 3), torch.ones(1))
    with pytest.raises(ValueError, match=r"times .* the one at position 3"):
        ts.attention(q, q, q, bias=bias, cu_seqlens=torch.tensor([0, 2, 4, 6]))


GATES, TIMES = -torch.rand((2, 2, 40), generator=torch.Generator().manual_seed(0)), torch.arange(40.0)
REFUSED: dict[str, Callable[[], ts.DecayBias]] = {
    "log_gates must be at most 0": lambda: ts.DecayBias(GATES.index_fill(2, torch.tensor([7]), 1e-6)),
    "not NaN: the one at position 7 is above 0 or NaN$": lambda: ts.DecayBias(
        GATES.index_fill(2, torch.tensor([7, 9]), torch.nan)
    ),
    "log_gates must be a floating": lambda: ts.DecayBias(GATES.long()),
    "log_gates must be \\[batch": lambda: ts.DecayBias(GATES[0]),
    "log_gates must be \\[2, 2, 40\\]": lambda: ts.DecayBias(GATES[..., :39]),
    "got \\[2, 1, 40\\]": lambda: ts.DecayBias(GATES[:, :1]),
    "times must be finite and never go back": lambda: ts.DecayBias.at(TIMES.flip(0), torch.ones(2)),
    "at position 39 goes back, is not finite or": lambda: ts.DecayBias.at(
        TIMES.index_fill(0, torch.tensor([39]), torch.inf), torch.ones(2)
    ),
    "times must be \\[40\\] or": lambda: ts.DecayBias.at(TIMES[:39], torch.ones(2)),
    "times must be a tensor of integers": lambda: ts.DecayBias.at(TIMES.bool(), torch.ones(2)),
    "in padding repeat the last time.*position 38": lambda: ts.DecayBias.at(
        TIMES.index_fill(0, torch.tensor([38, 39]), 0.0), torch.ones(2)
    ),
    "slope \\* \\(time - first time\\) must be at most 2\\^127: the one at position 39": lambda: ts.DecayBias.at(
        TIMES.double().index_fill(0, torch.tensor([39]), 2.0**100), torch.tensor([1.0, 2.0**28])
    ),
    "at position 3 .* lies too far": lambda: ts.DecayBias.at(
        torch.tensor([0, 1, 2] + [1e305] * 37, dtype=torch.float64), torch.full((2,), 1e18)
    ),
    "no gradient.*times.detach": lambda: ts.DecayBias.at(TIMES.clone().requires_grad_(), torch.ones(2)),
    "slopes must be 0 or positive": lambda: ts.DecayBias.at(TIMES, torch.tensor([1.0, -0.5])),
    "slopes must be \\[2\\] or": lambda: ts.DecayBias.at(TIMES, torch.ones(3)),
    "slopes must be a floating": lambda: ts.DecayBias.at(TIMES, torch.ones(2).long()),
    "pass causal=False": lambda: ts.DecayBias(GATES, future=GATES),
}


@backends
def test_steep_slopes_and_far_times(backend: str) -> None:
    """As far as they are allowed: no NaN, and nothing beyond the own token where others are far away."""
    q, k, v = (tensor.requires_grad_() for tensor in inputs())
    times = TIMES.double() * 2.0**57
    slopes = torch.tensor([2.0**64, 1.0]).requires_grad_()
    out = ts.attention(q, k, v, bias=ts.DecayBias.at(times, slopes), backend=backend)
    torch.testing.assert_close(out, v)
    out.sum().backward()
    for tensor in (q, k, v, slopes):
        assert tensor.grad is not None
        assert bool(torch.isfinite(tensor.grad).all())


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_a_slope_of_zero(backend: str, causal: bool) -> None:
    """No penalty, and the gradient of a penalty nonetheless: that of a slope next to it."""
    q, k, v = (tensor.double() for tensor in inputs(300))
    times = random_times(300)

    def found(slope: float, equal: bool = False) -> tuple[Tensor, Tensor]:
        slopes = torch.tensor([slope, 0.3], dtype=torch.float64).requires_grad_()
        bias = ts.DecayBias.at(torch.zeros_like(times) if equal else times, slopes)
        out = ts.attention(q, k, v, bias=bias, causal=causal, backend=backend)
        return out, torch.autograd.grad(out.square().sum(), slopes)[0]

    out, gradient = found(0.0)
    plain = ts.attention(q, k, v, causal=causal, backend=backend)
    torch.testing.assert_close(out[:, 0], plain[:, 0], rtol=0.0, atol=1e-14)
    assert abs(float(gradient[0])) > 1.0
    torch.testing.assert_close(gradient, found(1e-9)[1], rtol=1e-5, atol=0.0)
    assert found(0.0, equal=True)[1].tolist() == [0.0, 0.0]


@backends
@pytest.mark.parametrize("kind", ["gates", "times", "both sides"])
def test_an_empty_batch(backend: str, kind: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in inputs(batch=0))
    gates, slopes = torch.zeros((0, 2, 40), requires_grad=True), torch.ones(2, requires_grad=True)
    bias = (
        ts.DecayBias.at(TIMES, slopes) if kind == "times" else ts.DecayBias(gates, gates if "both" in kind else None)
    )
    out = ts.attention(q, k, v, bias=bias, causal="both" not in kind, backend=backend)
    assert out.shape == q.shape
    out.sum().backward()
    learned = slopes if kind == "times" else gates
    assert learned.grad is not None
    assert bool((learned.grad == 0).all())


@backends
@pytest.mark.parametrize("error", REFUSED)
def test_refused(error: str, backend: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        ts.attention(*inputs(), bias=REFUSED[error](), backend=backend)


def test_gates_of_both_sides_must_be_given() -> None:
    with pytest.raises(ValueError, match="future="):
        ts.attention(*inputs(), bias=ts.DecayBias(torch.zeros(1, 2, 40)), causal=False)


@pytest.mark.parametrize("kind", ["gates", "times"])
def test_compiled(kind: str) -> None:
    """Gates to gradients in one graph."""

    def loss(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, slopes: Tensor, times: Tensor) -> Tensor:
        gates = torch.nn.functional.logsigmoid(logits)
        bias = ts.DecayBias(gates) if kind == "gates" else ts.DecayBias.at(times, slopes)
        return ts.attention(q, k, v, bias=bias).square().sum()

    leaves = [*inputs(150), random_gates(2, 2, 150), torch.tensor([0.3, 0.01])]
    found = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        run(*leaves, random_times(150)).backward()
        found.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    assert len(found[0]) == 4
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_autocast_and_checkpointing() -> None:
    leaves = [*inputs(150), random_gates(2, 2, 150)]
    found = []
    for checkpoint in (False, True):

        def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return ts.attention(q, k, v, bias=ts.DecayBias(gates))

        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        out = (
            torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False) if checkpoint else attend(*leaves)
        )
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


# The grids of other implementations' own tests. FoX: (rows, heads, queries, keys, head_dim), scores scaled by a half.
FOX = [(4, 2, 1020, 2098, 64), (4, 2, 1024, 2048, 128)]
# flash-linear-attention: (rows, length, key heads, heads, head_dim, scale).
FLA = [(1, 63, 1, 1, 64, 1.0), (3, 111, 2, 2, 100, 1.0), (3, 1024, 2, 8, 60, 0.1), (3, 1024, 2, 8, 128, 0.1)]
FLA_PACKED = [(0, 15), (0, 256, 500, 1000), (0, 15, 100, 300, 1200, 2000)]  # borders of documents


def check_by_both_rules(case: Case, largest: float | None = None, relative: float | None = None) -> None:
    """By our own budget and by theirs: the largest error of any number, or the root mean square relative to it."""
    judge, found = Judge(case), case.run("blocked")
    judge.check(found)
    for name, truth in judge.truth.items():
        error = found[name].double() - truth
        if largest is not None:
            assert float(error.abs().max()) <= largest, name
        if relative is not None:
            assert float(error.square().mean().sqrt()) <= relative * float(truth.square().mean().sqrt()), name


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("low", [0.0, 5.0])
@pytest.mark.parametrize("shape", FOX)
def test_grid_of_fox(shape: tuple[int, int, int, int, int], low: float, padded: bool) -> None:
    rows, heads, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(24)
    logits = low + 5.0 * torch.rand((rows, heads, keys), generator=generator)
    starts = torch.randint(keys, (rows, 1), generator=generator)
    case = random_case(
        batch=rows, heads=heads, queries=queries, keys=keys, dim=dim, dtype=torch.float16, bias="gates", scale=0.5,
        log_gates=torch.nn.functional.logsigmoid(logits),
        key_padding_mask=torch.arange(keys) >= starts if padded else None,
    )  # fmt: skip
    check_by_both_rules(replace(case, q=case.q / 2, k=case.k / 2, v=case.v / 2), largest=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FLA)
def test_grid_of_flash_linear_attention(shape: tuple[int, int, int, int, int, float]) -> None:
    rows, length, kv_heads, heads, dim, scale = shape
    check_by_both_rules(mild(rows, length, kv_heads, heads, dim, scale=scale), relative=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("borders", FLA_PACKED, ids=str)
def test_packed_grid_of_flash_linear_attention(borders: tuple[int, ...]) -> None:
    case = mild(1, borders[-1], 2, 8, 64, scale=0.1, cu_seqlens=torch.tensor(borders))
    check_by_both_rules(case, relative=0.004)


def mild(rows: int, length: int, kv_heads: int, heads: int, dim: int, **features: Any) -> Case:
    """Gates as flash-linear-attention's tests have them, between e^-0.1 and e^-0.01."""
    generator = torch.Generator().manual_seed(42)
    gates = -0.01 - 0.09 * torch.rand((rows, heads, length), generator=generator)
    return random_case(
        batch=rows, heads=heads, kv_heads=kv_heads, queries=length, dim=dim, dtype=torch.float16, bias="gates",
        log_gates=gates, **features,
    )  # fmt: skip
