"""What attention returns besides its output: the log-sum-exp with its gradient, and which keys were visited.

Both are compared with float64 dense attention. A log-sum-exp is off by at most the weighted mean of what its scores
are off by: each by the rounding of an inner product and of a bias; and it misses -ln(1 - tolerance) of skipped keys.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.budget import FACTOR, size
from tests.ops.contract.features import FEATURES, feature_case
from tests.ops.contract.places import MODES, NOT_INTERPRETED, WITH_WINDOWS, Place, at, formats, slow_in_interpreter
from tests.ops.dense import LEAVES, Case, Results, bias_of, dense, scores_of, values_of
from trainshort.ops import attention

SOME = ["causal_steep", "symmetric_steep", "one_sided", "left_right_slopes", "bucket", "grouped", "packed_steep",
        "left_padding", "right_padding_symmetric", "query_start_beyond_the_keys", "query_start_before_symmetric",
        "padding_and_query_start", "no_bias", "dropout", "gates", "borders_and_padding",
        "times_both_sides"]  # fmt: skip


def returned(case: Case, backend: str) -> ts.AttentionOutput:
    return attention(
        case.q, case.k, case.v, bias=case.bias, backend=backend, return_lse=True, return_windows=True,
        **case.arguments(), **case.dropped(),
    )  # fmt: skip


def exact_lse(case: Case) -> Tensor:
    scores, blind = scores_of(case, torch.float64)
    return torch.logsumexp(scores, dim=-1).masked_fill(blind[..., 0], -math.inf)


def allowed_error(case: Case) -> Tensor:
    """Of the log-sum-exp of each query, [B, H, Tq]."""
    unit = 2.0**-53 if case.q.dtype == torch.float64 else 2.0**-24
    weights = dense(case)[1]
    k = values_of(replace(case, v=case.k), torch.float64)
    products = case.q.double().abs() @ k.abs().transpose(-2, -1) * abs(case.true_scale)
    each = (case.q.shape[3] + 8) * products + 8 * torch.as_tensor(bias_of(case, torch.float64)).abs()
    rounding = unit * ((weights * each).sum(-1) + 8 + 8 * exact_lse(case).abs().masked_fill(~case.seen.any(-1), 0.0))
    # Tiles of 128 queries are biased relative to one of them.
    steepest = 0.0 if case.slopes is None else float(case.slopes.abs().max())
    return FACTOR * (rounding + unit * 128 * steepest) - math.log1p(-case.may_skip)


def check_lse(case: Case, lse: Tensor | None) -> None:
    assert lse is not None
    assert lse.dtype == (torch.float64 if case.q.dtype == torch.float64 else torch.float32)
    assert lse.shape == case.q.shape[:3]
    truth, blind = exact_lse(case), ~case.seen.any(-1)
    assert torch.equal(torch.isneginf(lse), blind)
    error = (lse.double() - truth).abs().masked_fill(blind, 0.0)
    assert bool((error <= allowed_error(case)).all()), float((error / allowed_error(case)).max())


def check_windows(case: Case, windows: ts.Windows | None) -> Tensor:
    """That they are in sight and hold all but `tolerance` of every query's mass. Returns the pairs visited."""
    assert windows is not None
    first, end = windows
    assert first.dtype == end.dtype == torch.int32
    assert first.shape == end.shape == case.q.shape[:3]
    key = torch.arange(case.k.shape[2], device=case.q.device)
    visited = (key >= first[..., None]) & (key < end[..., None])
    assert bool((visited <= case.seen).all()), "a key out of sight"
    assert torch.equal(visited.any(-1), case.seen.any(-1))
    assert bool((first[~case.seen.any(-1)] == 0).all())
    skipped = dense(case)[1].masked_fill(visited, 0.0).sum(-1)
    assert float(skipped.max()) <= case.may_skip * (1 + 1e-6) + 1e-12
    return visited


@at(*NOT_INTERPRETED)
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in SOME])
def test_lse_and_windows_of_every_feature(feature: str, mode: str, place: Place) -> None:
    check_all(feature, mode, place)


@pytest.mark.parametrize("feature", SOME)
def test_lse_and_windows(feature: str, mode: str, place: Place) -> None:
    check_all(feature, mode, place)


def check_all(feature: str, mode: str, place: Place) -> None:
    case = feature_case(place, feature, **MODES[mode])
    found = returned(case, place.backend)
    check_lse(case, found.lse)
    visited = check_windows(case, found.windows)
    if not place.skips or case.may_skip == 0.0:
        assert torch.equal(visited, case.seen)
    # With a gradient asked for, a single query takes the same path; that of decoding adds up in another order.
    alone = replace(case, q=case.q.clone().requires_grad_()).attend(place.backend)
    torch.testing.assert_close(found.out, alone.detach(), rtol=0.0, atol=0.0)


@slow_in_interpreter
@at(*WITH_WINDOWS)
def test_windows_are_what_was_visited(place: Place) -> None:
    """Keys outside may hold anything, and there are some."""
    length = 450 if place.interpreted else 1300
    for features in ({}, {"causal": False}, {"batch": 1, "cu_seqlens": torch.tensor([0, 40, length])}):
        case = place.case(queries=length, slopes=2 * place.steep, tolerance=1e-3, **features)
        found = returned(case, place.backend)
        visited = check_windows(case, found.windows)
        assert float(visited.sum() / case.seen.sum()) < 0.8
        query = length - 1
        hidden = ~visited[0, 0, query] & case.seen[0, 0, query]
        assert bool(hidden.any())
        moved = case.v.clone()
        moved[0, 0, hidden] += 1e3
        again = replace(case, v=moved).attend(place.backend)
        assert torch.equal(found.out[0, 0, query], again[0, 0, query])


def test_each_can_be_asked_for_alone(place: Place) -> None:
    case = place.case()
    given = {"bias": case.bias, "backend": place.backend} | case.arguments()
    both = returned(case, place.backend)
    lse = attention(case.q, case.k, case.v, return_lse=True, **given)
    windows = attention(case.q, case.k, case.v, return_windows=True, **given)
    assert lse.windows is None
    assert windows.lse is None
    assert lse.lse is not None
    assert both.lse is not None
    assert torch.equal(lse.lse, both.lse)
    assert windows.windows is not None
    assert both.windows is not None
    assert torch.equal(windows.windows.first, both.windows.first)
    assert torch.equal(lse.out, windows.out)


def upstreams(case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of the output, and of the log-sum-exp: all of one sign, so that no gradient of a bias cancels."""
    generator = torch.Generator().manual_seed(3)
    lse = torch.rand(case.q.shape[:3], generator=generator) + 0.5
    return case.upstream(), lse.to(case.q.device)


def lse_gradients(case: Case, backend: str | None, dtype: torch.dtype | None, with_out: bool) -> Results:
    """Of every leaf; backend None: of the dense formula in `dtype`."""
    found = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    leaves = {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in found.items()}
    given = replace(case, **leaves)
    if backend is None:
        assert dtype is not None
        scores, blind = scores_of(given, dtype)
        out, lse = dense(given, dtype)[0], torch.logsumexp(scores, dim=-1)
        lse = lse.masked_fill(blind[..., 0], -math.inf)
    else:
        found = attention(
            given.q, given.k, given.v, bias=given.bias, backend=backend, return_lse=True,
            **given.arguments(), **given.dropped(),
        )  # fmt: skip
        out, lse = found.out, found.lse
    grad, grad_lse = upstreams(case)
    results, given_gradients = ([out, lse], [grad, grad_lse]) if with_out else ([lse], [grad_lse])
    gradients = torch.autograd.grad(
        results, list(leaves.values()), [g.to(r.dtype) for g, r in zip(given_gradients, results, strict=True)],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return dict(zip(leaves, gradients, strict=True))


def lse_budget(case: Case, truth: Results) -> Results:
    """What float32 loses, what it may lose, and what skipping costs: sums over keys of |p - p'| are at most 2 eps."""
    lossy = lse_gradients(case, None, torch.float32, with_out=False)
    group = case.q.shape[1] // case.k.shape[1]
    scores, blind = scores_of(case, torch.float64)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
    finite = scores.abs().masked_fill(torch.isinf(scores), 0.0)
    heavy = weights * (2.0 + finite + torch.logsumexp(scores, dim=-1, keepdim=True).abs())
    grad = upstreams(case)[1].double()
    k = values_of(replace(case, v=case.k), torch.float64)
    scale, unit = abs(case.true_scale), 2.0**-24
    terms = {
        "q": (heavy @ k.abs()) * grad[..., None] * scale,
        "k": ((heavy * grad[..., None]).transpose(-2, -1) @ case.q.double().abs() * scale)
        .unflatten(1, (-1, group))
        .sum(2),
    }
    largest = 2.0 + float((weights * finite).sum(-1).max())
    skipping = 2.0 * case.may_skip * float(grad.sum())
    longest = {"q": float(k.norm(dim=-1).max()) * scale, "k": float(case.q.double().norm(dim=-1).max()) * scale}
    furthest = float(torch.as_tensor(bias_of(case, torch.float64)).abs().max()) if case.slopes is not None else 1.0
    furthest = furthest / float(case.slopes.min()) if case.slopes is not None else 1.0
    allowed = {}
    for name, exact in truth.items():
        magnitude = terms.get(name, largest * exact.abs())
        far = longest.get(name, 0.0 if name == "v" else furthest * math.sqrt(case.k.shape[2]))
        loss = size(name, lossy[name].double() - exact)
        allowed[name] = FACTOR * (loss + 4 * unit * size(name, magnitude)) + skipping * far
    return allowed


@slow_in_interpreter
@formats(torch.float32)
@pytest.mark.parametrize("feature", SOME)
def test_gradient_of_the_lse(feature: str, dtype: torch.dtype, place: Place) -> None:
    for tolerance in (None,) if place.backend == "triton" else (0.0, None):  # parts below: with 0
        case = feature_case(place, feature, tolerance=tolerance)
        truth = lse_gradients(case, None, torch.float64, with_out=False)
        allowed = lse_budget(case, truth)
        found = lse_gradients(case, place.backend, None, with_out=False)
        for name, exact in truth.items():
            error = size(name, found[name].double() - exact)
            assert bool((error <= allowed[name]).all()), (name, float((error / allowed[name]).max()))
        both = lse_gradients(case, place.backend, None, with_out=True)
        alone = case.run(place.backend)
        for name in truth:  # they add up
            expected = alone[name].double() + found[name].double()
            torch.testing.assert_close(
                both[name].double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
            )


@at("reference", "blocked", "blocked_gpu")
@formats(torch.float64)
@pytest.mark.parametrize("feature", ["causal_steep", "right_padding_symmetric", "query_start_by_row", "borders",
                                     "gates_right_padding", "times_right_padding"])  # fmt: skip
def test_gradient_of_the_lse_in_float64(feature: str, dtype: torch.dtype, place: Place) -> None:
    case = feature_case(place, feature, dtype=dtype, tolerance=0.0)
    truth = lse_gradients(case, None, torch.float64, with_out=True)
    found = lse_gradients(case, place.backend, None, with_out=True)
    for name, exact in truth.items():
        rounding = 1e-5 if found[name].dtype == torch.float32 else 1e-9
        torch.testing.assert_close(found[name].double(), exact, rtol=rounding, atol=1e-9)


@formats(torch.float32)
def test_parts_can_be_merged(dtype: torch.dtype, place: Place) -> None:
    """Attention to two spans of keys, as devices that hold one each compute it: output and gradients of the whole."""
    case = place.case(tolerance=0.0, batch=1, slopes=place.steep)
    length = case.q.shape[2]

    def gradients(parts: list[tuple[int, int]]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, case.slopes)]
        q, k, v, slopes = leaves
        found = [
            attention(
                q, k[:, :, low:high], v[:, :, low:high], bias=ts.LinearBias(slopes), query_start=-low, tolerance=0.0,
                return_lse=True, backend=place.backend,
            )
            for low, high in parts
        ]  # fmt: skip
        sums = torch.stack([one.lse for one in found if one.lse is not None])
        weights = torch.softmax(sums, dim=0)
        out = sum(weight[..., None] * one.out for weight, one in zip(weights, found, strict=True))
        return [out.detach(), *torch.autograd.grad(out, leaves, case.upstream())]

    third = length // 3
    for whole, merged in zip(gradients([(0, length)]), gradients([(0, third), (third, length)]), strict=True):
        torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


@slow_in_interpreter
@formats(torch.float32)
@pytest.mark.parametrize(
    "feature", ["causal_steep", "gates", "gates_both_sides", "borders", "borders_both_sides", "times_both_sides"]
)
def test_parts_of_a_mask_can_be_merged(feature: str, dtype: torch.dtype, place: Place) -> None:
    """The same where masks say which keys are in a part: queries in padding know how far away they stand, and behind
    which borders."""
    case = feature_case(place, feature, tolerance=0.0)
    key = torch.arange(case.k.shape[2], device=case.k.device).expand(case.q.shape[0], -1)
    third = case.k.shape[2] // 3

    def gradients(masks: list[Tensor | None]) -> Results:
        found = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in found.items()}
        parts = [returned(replace(case, **leaves, key_padding_mask=mask), place.backend) for mask in masks]
        weights = torch.softmax(torch.stack([part.lse for part in parts if part.lse is not None]), dim=0)
        out = sum(weight[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
        assert isinstance(out, Tensor)
        upstream = torch.autograd.grad(out, list(leaves.values()), case.upstream())
        return {"out": out.detach(), **dict(zip(leaves, upstream, strict=True))}

    expected, merged = gradients([None]), gradients([key < third, key >= third])
    for name, whole in expected.items():
        torch.testing.assert_close(merged[name], whole, rtol=2e-4, atol=2e-5 * float(whole.abs().max()))


def test_a_border_in_padding(place: Place) -> None:
    """What padding hides of a query's own surroundings still stands between it and the real keys."""
    gates = torch.full((1, place.heads, 80), -0.1)
    gates[:, 0, 60] = -math.inf
    mask = torch.arange(80)[None] < 40
    case = place.case(batch=1, queries=80, bias="gates", log_gates=gates, key_padding_mask=mask)
    found = returned(case, place.backend)
    assert found.lse is not None
    assert found.windows is not None
    cut_off = torch.zeros((1, place.heads, 80), dtype=torch.bool, device=place.device)
    cut_off[:, 0, 60:] = True
    assert torch.equal(torch.isneginf(found.lse), cut_off)
    assert torch.equal(found.windows.end == 0, cut_off)
    assert bool(torch.isfinite(found.out).all())


@slow_in_interpreter
def test_one_query(place: Place) -> None:
    """A step of decoding, which has paths of its own."""
    for features in ({}, {"batch": 2, "heads": 4, "kv_heads": 2}):
        case = place.case(queries=1, keys=place.cache, **features)
        norms = case.k.float().norm(dim=-1).amax(-1) * 1.001
        for given in (case, replace(case, key_norms=norms, tolerance=1e-3)):
            with torch.no_grad():
                lse = attention(
                    given.q, given.k, given.v, bias=given.bias, backend=place.backend, return_lse=True,
                    **given.arguments(),
                ).lse  # fmt: skip
                check_lse(given, lse)
                check_windows(given, returned(given, place.backend).windows)


@at("reference", "blocked", "triton_gpu")
def test_autocast(place: Place) -> None:
    case = place.case()
    with torch.autocast(place.device, dtype=torch.bfloat16):
        found = returned(case, place.backend)
    rounded = replace(case, q=case.q.bfloat16(), k=case.k.bfloat16(), v=case.v.bfloat16())
    assert found.out.dtype == torch.bfloat16
    check_lse(rounded, found.lse)


@slow_in_interpreter
@at("blocked", "interpreted", "triton_gpu")
def test_compiled(place: Place) -> None:
    case = place.case()
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]

    def compute(q: Tensor, k: Tensor, v: Tensor) -> ts.AttentionOutput:
        return returned(replace(case, q=q, k=k, v=v), place.backend)

    expected = compute(*leaves)
    found = torch.compile(compute, fullgraph=True, backend="aot_eager")(*leaves)
    assert found.lse is not None
    assert expected.lse is not None
    assert found.windows is not None
    assert expected.windows is not None
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.windows.end, expected.windows.end)
    for results in ((found.out, expected.out), (found.lse, expected.lse)):
        one, two = (torch.autograd.grad(result.sum(), leaves[:2], retain_graph=True) for result in results)
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b)  # compiled, what is not used has a gradient of zeros


@at("auto")
def test_without_a_bias_auto_takes_a_backend_that_can(place: Place) -> None:
    case = place.case(bias="none")
    check_lse(case, returned(case, "auto").lse)
    explained = ts.explain(case.q, case.k, case.v, return_lse=True)
    assert explained.path == "blocked"
    assert "output alone" in explained.why_not["sdpa"]
