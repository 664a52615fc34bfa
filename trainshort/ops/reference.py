"""The specification: dense attention that reads like the formula.

    score[i, j] = scale * q[i] . k[j] + bias(i, j)        where query i may see key j, else -inf
    output[i]   = sum over j of softmax(score[i])[j] * v[j]          under dropout, some of them, times 1/(1 - p)

It builds the whole length x length matrix, in float64 for float64 inputs and in float32 otherwise, and skips
nothing. Every other backend is tested against it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from trainshort.ops.dropout import factors, query_seeds
from trainshort.ops.problem import Problem


def attend(problem: Problem) -> Tensor:
    """Dense attention, [B, H, Tq, D]. Autograd differentiates it."""
    return attend_with_lse(problem)[0]


def attend_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of the scores [B, H, Tq]; that of a query that sees no key says nothing."""
    with torch.autocast(problem.q.device.type, enabled=False):  # its dtypes are for the inputs, not for the sums
        kept = _dropout_factors(problem)
        if problem.cu_seqlens is None:
            return _attend(problem, kept)
        borders = problem.cu_seqlens.tolist()
        documents = [
            _attend(_document(problem, low, high), None if kept is None else kept[..., low:high, low:high])
            for low, high in itertools.pairwise(borders)
        ]
        if not documents:
            return problem.q * 0.0, problem.q.sum(-1, dtype=problem.accumulate_dtype)
        outs, sums = zip(*documents, strict=True)
        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _dropout_factors(problem: Problem) -> Tensor | None:
    """What dropout multiplies each weight by, [B, H, Tq, Tk]."""
    if problem.seed is None:
        return None
    key = torch.arange(problem.k.shape[2], device=problem.k.device)
    return factors(query_seeds(problem.seed, *problem.q.shape[:3]), key, problem.dropout, problem.accumulate_dtype)


def _document(problem: Problem, first: int, end: int) -> Problem:
    """One of the documents that are packed into a row."""
    q, k, v = (tensor[:, :, first:end] for tensor in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else problem.bias.part(slice(None), slice(None), slice(first, end))
    return replace(problem, q=q, k=k, v=v, bias=bias, cu_seqlens=None, key_norms=None)


def _attend(problem: Problem, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = problem.accumulate_dtype
    q, k, v = (tensor.to(dtype) for tensor in (problem.q, problem.k, problem.v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    # What stands in a key that nobody sees, or in a query that sees nothing, must not even be multiplied by zero.
    seen = visible(problem).expand(-1, q.shape[1], -1, -1)  # [B or 1, H, Tq, Tk]
    unseen, blind = ~seen.any(2)[..., None], ~seen.any(3)[..., None]
    q, k, v = q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)

    scores = problem.scale * (q @ k.transpose(-2, -1)) + bias_matrix(problem, dtype)  # [B, H, Tq, Tk]
    scores = scores.masked_fill(~seen, float("-inf"))
    # A row that sees no key would be 0/0: let it see everything, then take its output away.
    scores = scores.masked_fill(blind, 0.0)
    weights = torch.softmax(scores, dim=-1)
    weights = weights if kept is None else weights * kept
    return (weights @ v).masked_fill(blind, 0.0).to(problem.q.dtype), torch.logsumexp(scores, dim=-1)


def visible(problem: Problem) -> Tensor:
    """Which query may see which key: bool [B or 1, H or 1, Tq, Tk]."""
    key = torch.arange(problem.k.shape[2], device=problem.k.device)
    first, end = problem.key_runs()
    position = problem.positions()[:, None, :, None]
    in_run = ((key >= first[..., None]) & (key < end[..., None]))[:, None]  # [B or 1, 1, Tq, Tk]
    if problem.bias is not None:
        hidden = problem.bias.hides(problem.bias_positions()[:, None, :, None], key[None, None, None])
        in_run = in_run if hidden is None else in_run & ~hidden
    if problem.causal:
        return in_run & (key <= position)
    looks_back = torch.tensor([sight != "future" for sight in problem.sights], device=key.device)
    looks_ahead = torch.tensor([sight != "past" for sight in problem.sights], device=key.device)
    return in_run & (looks_back[:, None, None] | (key >= position)) & (looks_ahead[:, None, None] | (key <= position))


def bias_matrix(problem: Problem, dtype: torch.dtype) -> Tensor | float:
    """The bias of every pair, [B or 1, H, Tq, Tk]."""
    key = torch.arange(problem.k.shape[2], device=problem.k.device)
    query = problem.bias_positions()[:, None, :, None]  # [B or 1, 1, Tq, 1]
    return 0.0 if problem.bias is None else problem.bias.between(query, key[None, None, None], dtype)
