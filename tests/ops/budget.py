"""How wrong a backend may be: derived from what dense attention loses itself in the same number format.

For the output and for each gradient, head by head, in the Euclidean norm:

    allowed = FACTOR * (loss + unit * magnitude) + skipping

loss        what dense attention with float32 arithmetic and results in the inputs' dtype is away from float64, on
            the same inputs. Its backward pass computes delta = dout . out from the output as it was rounded to that
            dtype, as every flash kernel does; one that kept the output in float32 would lose less. For float64
            inputs: the same measurement on the inputs rounded to float32, times 2^-29, plus the rounding of a result
            to its own dtype (slopes may well be float32).
unit        the unit roundoff of the arithmetic, and magnitude the same sums with every term taken absolute and every
            weight e^(score - total) counted 1 + |score| + |total| times: an error that no order of operations can
            promise to avoid, where `loss` happens to be small by luck.
skipping    what leaving out a softmax mass of `tolerance` can cost at most (design: "What the skip can cost").
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.dense import (
    LEAVES,
    Case,
    Results,
    bias_of,
    distances,
    exact,
    native,
    scores_of,
    t5_bucket,
    values_of,
)

FACTOR = 3.0
BY_HEAD = ("out", "q", "k", "v", "log_gates", "future_gates")


def size(name: str, tensor: Tensor) -> Tensor:
    """The norm of a result: [B, H] for what has heads, a single number for the rest."""
    tensor = tensor.double()
    return tensor.flatten(2).norm(dim=-1) if name in BY_HEAD else tensor.norm()


def error_budget(case: Case, keep: Tensor | None = None, skipping: bool = True) -> Results:
    """The allowed size of the error of each result. keep: the set of pairs that is meant to be computed."""
    measured, unit, shrink = case, 2.0**-24, 1.0
    if case.q.dtype == torch.float64:
        shrink = 2.0**-29
        unit = 2.0**-53
        rounded = {n: getattr(case, n).float() for n in LEAVES if getattr(case, n) is not None}
        measured = replace(case, **rounded)
    truth, lossy = exact(measured, keep), native(measured, keep)
    terms = magnitudes(case, keep)
    costs = skipping_costs(case) if skipping and case.may_skip and case.k.shape[2] else {}
    allowed = {}
    for name in truth:
        loss = size(name, lossy[name].double() - truth[name]) * shrink
        if case.q.dtype == torch.float64:
            stored = case.q.dtype if name == "out" else getattr(case, name).dtype
            loss = loss + size(name, truth[name]) * torch.finfo(stored).eps / 2
        allowed[name] = FACTOR * (loss + unit * size(name, terms[name])) + costs.get(name, 0.0)
    return allowed


def magnitudes(case: Case, keep: Tensor | None) -> Results:
    """Every result with the terms of its sums taken absolute, in float64."""
    group = case.q.shape[1] // case.k.shape[1]
    q, upstream = case.q.double().abs(), case.upstream().double().abs()
    k, v = values_of(replace(case, v=case.k), torch.float64).abs(), values_of(case, torch.float64).abs()
    scores, blind = scores_of(case, torch.float64, keep)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
    total = torch.logsumexp(scores, dim=-1, keepdim=True).abs()
    weights = weights * (1.0 + scores.abs().masked_fill(torch.isinf(scores), 0.0) + total)
    dweights = upstream @ v.transpose(-2, -1) * case.factors
    dscores = weights * (dweights + (weights * dweights).sum(-1, keepdim=True))
    weights = weights * case.factors
    scale = abs(case.true_scale)
    terms = {
        "out": weights @ v,
        "q": dscores @ k * scale,
        "k": (dscores.transpose(-2, -1) @ q * scale).unflatten(1, (-1, group)).sum(2),
        "v": (weights.transpose(-2, -1) @ upstream).unflatten(1, (-1, group)).sum(2),
    }
    distance = distances(case)[:, None]
    if case.log_gates is not None:
        terms["log_gates"] = _crossing(dscores * (distance <= 0), case.log_gates)
        if case.future_gates is not None:
            ahead = (dscores * (distance > 0)).flip(2, 3)
            terms["future_gates"] = _crossing(ahead, case.future_gates).flip(2).roll(1, 2)
    elif case.slopes is not None and case.times is not None:
        steps = bias_of(replace(case, slopes=torch.ones_like(case.slopes)), torch.float64)
        terms["slopes"] = _over_rows(dscores * torch.as_tensor(steps).abs(), case.slopes)
    elif case.slopes is not None:
        steps = torch.where(distance > 0, distance - case.offset, -distance.double())
        if case.future is None:
            terms["slopes"] = _over_rows(dscores * steps, case.slopes)
        else:
            terms["slopes"] = _over_rows(dscores * steps * (distance <= 0), case.slopes)
            terms["future"] = _over_rows(dscores * steps * (distance > 0), case.future)
    if case.table is not None:
        bucket = t5_bucket(distance[:, 0], case.table.shape[0], case.max_distance, case.bidirectional)
        by_bucket = dscores.new_zeros((*dscores.shape[:3], case.table.shape[0]))  # [B, H, Tq, buckets]
        by_bucket.scatter_add_(3, bucket[:, None].expand_as(dscores), dscores)
        terms["table"] = by_bucket.movedim(1, 0).flatten(1, 2).norm(dim=1).T
    if case.strengths is not None:
        terms |= _kerple_terms(case, dscores, distance.abs().double())
    return terms


def _kerple_terms(case: Case, dscores: Tensor, steps: Tensor) -> Results:
    """dscores times the derivatives of the bias: dscores [B, H, Tq, Tk]."""
    assert case.strengths is not None
    assert case.exponents is not None
    a, p = (numbers.double()[:, None, None] for numbers in (case.strengths, case.exponents))
    if case.logarithmic:
        by_strength, by_exponent = p * steps / (1.0 + a * steps), torch.log(1.0 + a * steps)
    else:
        by_strength, by_exponent = steps**p, a * steps**p * steps.clamp_min(1.0).log()
    return {
        "strengths": _over_rows(dscores * by_strength, case.strengths),
        "exponents": _over_rows(dscores * by_exponent, case.exponents),
    }


def skipping_costs(case: Case) -> Results:
    """The largest size of the change of each result when every query skips a mass of `tolerance`."""
    group = case.q.shape[1] // case.k.shape[1]
    k, v = values_of(replace(case, v=case.k), torch.float64), values_of(case, torch.float64)
    diameter = 2.0 * (v - v.mean(2, keepdim=True)).norm(dim=-1).amax(-1)  # [B, H], at least the true one
    if case.dropout:  # the factors do not sum to one
        diameter = 2.0 * v.norm(dim=-1).amax(-1) / (1.0 - case.dropout)
    query, upstream = case.q.double().norm(dim=-1), case.upstream().double().norm(dim=-1)  # [B, H, Tq]
    longest = k.norm(dim=-1).amax(-1)
    furthest = float((distances(case)[:, None] * case.seen).abs().max())
    if case.times is not None:
        furthest = float((case.times - case.times[..., :1]).max())
    mass, scale = case.may_skip, abs(case.true_scale)
    dscores = 3.0 * mass * diameter[..., None] * upstream  # [B, H, Tq]: the sum over keys
    return {
        "out": mass * diameter * case.q.shape[2] ** 0.5,
        "q": scale * longest * dscores.norm(dim=-1),
        "k": (scale * dscores * query).sum(-1).unflatten(1, (-1, group)).sum(2),
        "v": (2.0 * mass / (1.0 - case.dropout) * upstream).sum(-1).unflatten(1, (-1, group)).sum(2),
        "slopes": dscores.sum() * furthest,
        "future": dscores.sum() * furthest,
        "log_gates": dscores.sum(-1) * case.k.shape[2] ** 0.5,
        "future_gates": dscores.sum(-1) * case.k.shape[2] ** 0.5,
    } | _skipping_costs_of_powers(case, dscores, furthest)


def _skipping_costs_of_powers(case: Case, dscores: Tensor, furthest: float) -> Results:
    if case.strengths is None or case.exponents is None:
        return {}
    steps = torch.tensor(max(furthest, 1.0), dtype=torch.float64, device=dscores.device)
    by_strength = dscores.sum((0, 2)) * steps ** case.exponents.double()  # [H]
    by_exponent = by_strength * case.strengths.double() * steps.log()
    return {"strengths": by_strength.norm(), "exponents": by_exponent.norm()}


def _crossing(terms: Tensor, log_gates: Tensor) -> Tensor:
    """[B, H, Tq, Tk] -> like log_gates: for each gate the terms of keys before it, the errors of queries apart."""
    crossing = torch.nn.functional.pad(terms, (1, 0)).cumsum(-1)[..., :-1] * (terms.flip(-1).cumsum(-1).flip(-1) > 0)
    by_gate = crossing.norm(dim=2)  # [B, H, Tk]
    return by_gate if log_gates.shape[0] > 1 else by_gate.norm(dim=0, keepdim=True)


def _over_rows(terms: Tensor, slopes: Tensor) -> Tensor:
    """[B, H, Tq, Tk] -> like slopes: the errors of a query's terms go together, those of different queries do not."""
    by_head = terms.sum(-1).norm(dim=-1)  # [B, H]
    return by_head if slopes.dim() == 2 else by_head.norm(dim=0)


def excess(results: Results, truth: Results, allowed: Results) -> dict[str, float]:
    """For each result the largest error as a multiple of what is allowed; above 1 is too much."""
    return {
        name: float(_ratio(size(name, results[name].double() - truth[name]), allowed[name]).max())
        for name in truth
        if truth[name].numel()
    }


def _ratio(error: Tensor, allowed: Tensor) -> Tensor:
    ratio = torch.where(error == 0, 0.0, error / allowed)
    return torch.where(torch.isnan(ratio), torch.inf, ratio)


class Judge:
    """What a case should give and how far from it a result may be, computed once for all backends."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.truth = exact(case)
        self.allowed = error_budget(case)

    def check(self, results: Results) -> None:
        """Output and every gradient agree with float64 dense attention as well as the number format allows."""
        assert results.keys() == self.truth.keys()
        for name, tensor in results.items():
            like = self.case.q if name == "out" else getattr(self.case, name)
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
        errors = excess(results, self.truth, self.allowed)
        too_much = {name: error for name, error in errors.items() if not error <= 1.0}
        assert not too_much, f"errors as multiples of what is allowed: {too_much}"


def assert_within_budget(results: Results, case: Case) -> None:
    Judge(case).check(results)
