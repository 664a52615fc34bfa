"""Context parallelism with all ranks in one process: equal to one process, sound, and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_mode
from torch.utils._pytree import tree_leaves

import trainshort as ts
from tests.distributed.context_cases import NAMES, SPANS, Case, make, promised, slices
from trainshort.ops import operators
from trainshort.ops.context import passes
from trainshort.ops.context.exchange import message_size
from trainshort.ops.context.parallel import call_maker, simulate
from trainshort.ops.context.plan import Plan, make_plan
from trainshort.ops.context.transport import Sent, Simulated
from trainshort.ops.problem import DEFAULT_TOLERANCE


def over_ranks(
    case: Case, spans: list[int], tolerance: float | None, backend: str = "auto"
) -> tuple[Tensor, list[Sent]]:
    parts = slices(spans)
    outs, sent = simulate(
        [(case.q[:, :, own], case.k[:, :, own], case.v[:, :, own]) for own in parts],
        bias=[case.bias(own) for own in parts],
        causal=case.causal,
        tolerance=tolerance,
        key_padding_mask=None if case.mask is None else [case.mask[:, own] for own in parts],
        cu_seqlens=case.cu_seqlens,
        dropout=case.dropout,
        seed=case.seed,
        backend=backend,
    )
    return torch.cat(outs, dim=2), sent


def plans_of(case: Case, spans: list[int], tolerance: float, ranks: Simulated | None = None) -> list[Plan]:
    options = {"causal": case.causal, "tolerance": tolerance, "cu_seqlens": case.cu_seqlens}
    calls = [
        call_maker(
            *(tensor[:, :, own] for tensor in (case.q, case.k, case.v)),
            case.bias(own),
            "auto",
            options | {"key_padding_mask": None if case.mask is None else case.mask[:, own]},
        )
        for own in slices(spans)
    ]
    protocols = [make_plan(rank, call, case.q.device) for rank, call in enumerate(calls)]
    return (ranks or Simulated(len(spans))).run(protocols)


FAST = ("slopes", "slopes and dropout", "gates, both sides", "slopes with padding, both sides")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_equals_one_process(name: str) -> None:
    case = make(name)
    expected = case.whole()
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, case.inputs, grad)
    tolerance = 1e-6
    out, sent = over_ranks(case, SPANS, tolerance)
    found = torch.autograd.grad(out, case.inputs, grad)
    allowed = promised(case, grad, tolerance)
    assert float((out - expected).detach().norm(dim=-1).max()) <= allowed["out"]
    dq, dk, dv = (own - other for own, other in zip(found[:3], wanted[:3], strict=True))
    assert float(dq.norm(dim=-1).max()) <= allowed["q"]
    assert float(dk.norm(dim=-1).sum()) <= allowed["k"]
    assert float(dv.norm(dim=-1).sum()) <= allowed["v"]
    for own, other in zip(found[3:], wanted[3:], strict=True):
        assert float((own - other).abs().max()) <= allowed["learned"]
        assert torch.allclose(own, other, atol=1e-4, rtol=1e-4)
    # Tolerance 0 fetches everything in sight. All of it is fetched, too, where nothing can be proved.
    everything = sum(plan.everything for plan in plans_of(case, SPANS, 0.0))
    fetched = sum(each.everything for each in sent)
    unproved = any(word in name for word in ("buckets", "powers", "no bias", "long key"))
    assert fetched == everything if unproved else fetched < everything


def test_float16_and_the_default_tolerance() -> None:
    q, k, v = (torch.randn(1, 4, 1000, 32, dtype=torch.bfloat16) for _ in range(3))
    case = Case(q, k, v, lambda own: ts.LinearBias(ts.alibi_slopes(4)))
    out, _ = over_ranks(case, [400, 300, 300], None)
    exact = ts.alibi_attention(q.double(), k.double(), v.double())
    own = ts.alibi_attention(q, k, v)
    assert float((out - exact).abs().max()) <= 1.5 * float((own - exact).abs().max())


def test_every_run_gives_the_same_bits() -> None:
    case = make("gates")
    grad = torch.randn_like(case.q)
    runs = []
    for _ in range(2):
        out, _ = over_ranks(case, SPANS, 1e-3)
        runs.append([out, *torch.autograd.grad(out, case.inputs, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def hostile(kind: str, tolerance: float) -> Case:
    """Inputs along the proof: keys that point at the queries where they are far, and away where they are near."""
    length, dim = 1024, 16
    q, k, v = (torch.randn(1, 2, length, dim, dtype=torch.float64) for _ in range(3))
    direction = torch.nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=0)
    if kind in ("aligned", "jumps"):
        q[:] = direction * (1 + 3 * torch.rand(1, 2, length, 1))
        k[:] = direction * 4
        if kind == "jumps":
            k[:, :, 256 * torch.arange(4)[:, None] + torch.arange(40)] *= -1
    elif kind == "common":
        k += 20 * direction
    elif kind == "growing":
        k *= torch.linspace(3, 0.1, length)[:, None]
    return Case(q, k, v, lambda own: ts.LinearBias(torch.tensor([0.05, 0.3], dtype=torch.float64)), causal=True)


@pytest.mark.parametrize("both_sides", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["random", "aligned", "jumps", "common", "growing"])
@pytest.mark.parametrize("tolerance", [0.3, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_what_is_not_fetched_weighs_less_than_half_the_tolerance(
    kind: str, tolerance: float, both_sides: bool
) -> None:
    case = hostile(kind, tolerance)
    case.causal = not both_sides
    length = case.q.shape[2]
    spans = [256, 200, 57, 255, 256]
    scores = case.q @ case.k.mT / case.q.shape[3] ** 0.5
    distance = torch.arange(length) - torch.arange(length)[:, None]
    bias = case.bias(slice(None))
    assert isinstance(bias, ts.LinearBias)
    scores = scores - bias.slopes[:, None, None] * distance.abs()
    if case.causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    weights = scores.softmax(-1)
    place, skipped = torch.arange(length), 0
    for plan, own in zip(plans_of(case, spans, tolerance), slices(spans), strict=True):
        for head, (first, end) in enumerate(plan.windows[plan.spans.rank, 0].tolist()):
            outside = (place < first) | (place >= end)
            assert float(weights[0, head, own][:, outside].sum(-1).max()) <= tolerance / 2
            skipped += int(outside.sum())
        # Rows that are computed from their own span alone
        rows = slice(own.start + plan.front, own.stop - plan.back)
        behind, ahead = place < own.start, place >= own.stop
        if rows.start < rows.stop:
            assert float(weights[0, :, rows][..., behind | ahead].sum(-1).max()) <= tolerance / 2
    assert skipped > 0, "nothing was put to the test"


@pytest.mark.parametrize("kind", ["random", "aligned", "jumps", "common", "growing"])
@pytest.mark.parametrize("both_sides", [False, True])
def test_what_stands_in_for_keys_costs_no_more_than_skipping(kind: str, both_sides: bool) -> None:
    """The gentle head fetches many keys; in the buffer of the steep one the centre stands in for most of them."""
    tolerance, spans = 1e-2, [256, 200, 57, 255, 256]
    case = hostile(kind, tolerance)
    case.causal = not both_sides
    for tensor in (case.q, case.k, case.v):
        tensor.requires_grad_()
    windows = [plan.windows[plan.spans.rank, 0] for plan in plans_of(case, spans, tolerance)]
    assert any(int(window[0, 0]) < int(window[1, 0]) for window in windows), "nothing stands in"
    expected, (out, _) = case.whole(), over_ranks(case, spans, tolerance)
    grad = torch.randn_like(out)
    (dq, dk, dv), right = (torch.autograd.grad(each, case.inputs, grad) for each in (out, expected))
    allowed = promised(case, grad, tolerance)
    assert float((out - expected).detach().norm(dim=-1).max()) <= allowed["out"]
    assert float((dq - right[0]).norm(dim=-1).max()) <= allowed["q"]
    assert float((dk - right[1]).norm(dim=-1).sum()) <= allowed["k"]
    assert float((dv - right[2]).norm(dim=-1).sum()) <= allowed["v"]


@pytest.mark.parametrize("both_sides", [False, True])
def test_outputs_are_means_of_values(both_sides: bool) -> None:
    """What stands in for keys has such a value too: what all values have in common, all outputs have."""
    case, spans = hostile("random", 0.3), [256, 200, 57, 255, 256]
    case.causal = not both_sides
    windows = [plan.windows[plan.spans.rank, 0] for plan in plans_of(case, spans, 0.3)]
    assert any(int(window[0, 0]) < int(window[1, 0]) for window in windows), "nothing stands in"
    out, _ = over_ranks(case, spans, 0.3)
    case.v = case.v + 1e6
    moved, _ = over_ranks(case, spans, 0.3)
    torch.testing.assert_close(moved - 1e6, out, rtol=0.0, atol=1e-8)


class Bytes(TorchDispatchMode):
    """How many bytes operations read and write, views apart."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = any(given.alias_info is not None and not given.alias_info.is_write for given in func._schema.returns)
        if not view and "empty" not in str(func):
            tensors = [each for each in tree_leaves((args[1:], kwargs, out)) if isinstance(each, Tensor)]
            changed = func._schema.returns and func._schema.returns[0].alias_info is not None
            self.total += sum(each.numel() * each.element_size() for each in tensors[: -1 if changed else None])
        return out


def test_gradients_are_added_at_borders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention apart, which stands still here, the backward pass reads and writes little."""
    q, k, v = (torch.randn(1, 4, 4096, 16, requires_grad=True) for _ in range(3))
    spans = [
        tuple(part.detach().requires_grad_() for part in parts)
        for parts in zip(*(each.split(1024, 2) for each in (q, k, v)), strict=True)
    ]

    def attend(*arguments: Any) -> tuple[Tensor, ...]:
        problem = operators.unpack(arguments)
        return torch.zeros_like(problem.q), problem.q.new_zeros(problem.q.shape[:3]), torch.zeros(1).int()

    def differentiate(*arguments: Any) -> tuple[Tensor, ...]:
        with no_dispatch_mode():
            problem = operators.unpack(arguments[operators.BACKWARD_COUNT :])
            gradients = [torch.zeros_like(each) for each in (problem.q, problem.k, problem.v)]
        return *gradients, *[torch.zeros(0)] * len(operators.LEARNED)

    monkeypatch.setattr(passes, "_operators", lambda plan: (attend, differentiate))
    outs, sent = simulate(spans, bias=ts.LinearBias(torch.tensor([2.0, 1.0, 0.5, 0.2])))
    inputs, grads = [tensor for span in spans for tensor in span], [torch.ones_like(out) for out in outs]
    with Bytes() as count:
        torch.autograd.grad(outs, inputs, grads)
    travelled = sum(own.gradients for own in sent)
    assert 0 < travelled < 0.2 * k.numel() * 8, "borders are to be small"
    assert count.total < k.numel() * k.element_size() + 12 * travelled, "more than borders, and one copy of dq"


def test_a_norm_that_is_no_number_is_fetched_by_everyone() -> None:
    for bad in (math.nan, math.inf):
        case = hostile("random", 1e-3)
        case.k[0, 1, 3] = bad
        plans = plans_of(case, [256] * 4, 1e-3)
        assert all(int(plan.windows[plan.spans.rank, 0, 1, 0]) == 0 for plan in plans)
        out, _ = over_ranks(case, [256] * 4, 1e-3)
        assert torch.equal(out.isnan(), case.whole().isnan())
        case = hostile("random", 1e-3)
        case.q[0, 1, 700] = bad  # only the rank that has this query needs everything
        assert [int(plan.windows[plan.spans.rank, 0, 1, 0]) == 0 for plan in plans_of(case, [256] * 4, 1e-3)][2]


def fetched_bytes(plan: Plan, k: Tensor) -> int:
    """Of keys and values that a rank fetches."""
    return sum(message_size(places.size, 0, k) for places in plan.traffic.wanted)


def test_bytes_are_those_of_the_formula() -> None:
    case = make("slopes")
    out, sent = over_ranks(case, SPANS, 1e-6)
    out.sum().backward()
    plans = plans_of(case, SPANS, 1e-6)
    assert sum(own.keys for own in sent) == sum(own.gradients for own in sent)
    for rank, own in enumerate(sent):
        assert own.gradients == fetched_bytes(plans[rank], case.k)
        assert own.ring == 4 * case.k[:, :, slices(SPANS)[rank]].numel() * 8 * 5
        assert own.bytes == own.bounds + own.keys + own.gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "most", "dtype"), [(16_384, 0.12, torch.float32), (65_536, 0.035, torch.bfloat16)]
)
def test_bytes_stay_below_their_share_of_a_ring(length: int, most: float, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 16, length, 64, dtype=dtype) for _ in range(3))
    case = Case(q, k, v, lambda own: ts.LinearBias(ts.alibi_slopes(16)))
    ranks = Simulated(4)
    plans = plans_of(case, [length // 4] * 4, DEFAULT_TOLERANCE[dtype], ranks)
    keys = sum(fetched_bytes(plan, case.k) for plan in plans)
    ring = 4 * k.numel() * k.element_size() * 3
    assert (2 * keys + sum(sent.bounds for sent in ranks.sent)) / ring <= most


REFUSED = {
    "dtype is torch.float32 on rank 0 and torch.float64 on rank 1": {"dtype": torch.float64},
    "head_dim is 16 on rank 0 and 32 on rank 1": {"dim": 32},
    "batch size is 1 on rank 0 and 2 on rank 1": {"batch": 2},
    "number of query heads is 4 on rank 0 and 8 on rank 1": {"heads": 8},
    "causal is yes on rank 0 and no on rank 1": {"causal": False},
    "tolerance is 0.5 on rank 0 and 0.25 on rank 1": {"tolerance": 0.25},
    "slopes or numbers of the bias": {"slopes": 2.0},
    "bias is LinearBias on rank 0 and None on rank 1": {"slopes": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_ranks_that_make_other_calls_are_refused_by_name(message: str) -> None:
    calls = []
    for other in ({}, REFUSED[message]):
        given = {
            "dtype": torch.float32,
            "dim": 16,
            "batch": 1,
            "heads": 4,
            "causal": True,
            "tolerance": 0.5,
            "slopes": 1.0,
        }
        given |= other
        q, k, v = (
            torch.randn(given["batch"], given["heads"], 20, given["dim"], dtype=given["dtype"]) for _ in range(3)
        )  # type: ignore[call-overload]
        bias = None if given["slopes"] is None else ts.LinearBias(given["slopes"] * ts.alibi_slopes(given["heads"]))  # type: ignore[arg-type,operator]
        calls.append(call_maker(q, k, v, bias, "auto", {"causal": given["causal"], "tolerance": given["tolerance"]}))
    with pytest.raises(ValueError, match=message):
        Simulated(2).run([make_plan(rank, call, torch.device("cpu")) for rank, call in enumerate(calls)])


def test_what_is_not_supported_is_refused() -> None:
    q = torch.randn(1, 2, 10, 8)
    spans = [(q, q, q)] * 2
    for options, message in (
        ({"query_start": 3}, "takes no query_start"),
        ({"key_norms": torch.ones(1, 2)}, "takes no key_norms"),
        ({"return_lse": True}, "takes no return_lse"),
        ({"backend": "reference"}, "runs in one process"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "end at its length 20"),
        (
            {"bias": ts.DecayBias.from_sums(torch.zeros(1, 2, 10).double(), torch.zeros(1, 2, 10).int())},
            "made of log gates",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            simulate(spans, **options)  # type: ignore[arg-type]
    holes = torch.ones(1, 10, dtype=torch.bool)
    holes[:, 5:] = False
    with pytest.raises(ValueError, match="row 0 has a hole"):
        simulate(spans, bias=ts.LinearBias(ts.alibi_slopes(2)), key_padding_mask=[holes, torch.ones(1, 10).bool()])
    times = torch.arange(10)
    with pytest.raises(ValueError, match="those of rank 1 begin before those of rank 0 end"):
        simulate(spans, bias=ts.DecayBias.at(times, ts.alibi_slopes(2)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8], ids=str)
def test_times_of_short_integers(dtype: torch.dtype) -> None:
    times, slopes = torch.arange(30).to(dtype), torch.tensor([0.5, 0.1])
    q, k, v = torch.randn(3, 1, 2, 30, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    parts = slices([12, 18])
    outs, _ = simulate(
        [(q[:, :, own], k[:, :, own], v[:, :, own]) for own in parts],
        bias=[ts.DecayBias.at(times[own], slopes) for own in parts],
    )
    whole = ts.attention(q, k, v, bias=ts.DecayBias.at(times, slopes))
    torch.testing.assert_close(torch.cat(outs, dim=2), whole)
