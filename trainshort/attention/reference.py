"""The specification: dense attention that reads like the formula.

    score[i, j] = scale * q[i] . k[j] + bias(j - i)       where query i may see key j, else -inf
    output[i]   = sum over j of softmax(score[i])[j] * v[j]

It builds the whole length x length matrix, in float64 for float64 inputs and in float32 otherwise, and skips
nothing. Every other backend is tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainshort.attention.bias import BucketBias, LinearBias
from trainshort.attention.problem import Problem


def attend(problem: Problem) -> Tensor:
    """Dense attention, [B, H, Tq, D]. Autograd differentiates it."""
    with torch.autocast(problem.q.device.type, enabled=False):  # its dtypes are for the inputs, not for the sums
        return _attend(problem)


def _attend(problem: Problem) -> Tensor:
    dtype = problem.accumulate_dtype
    q, k, v = (tensor.to(dtype) for tensor in (problem.q, problem.k, problem.v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    if problem.key_padding_mask is not None:  # what stands in padding must not even be multiplied by zero
        real = problem.key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(~real, 0.0), v.masked_fill(~real, 0.0)
    k, v = _without_the_future(problem, k), _without_the_future(problem, v)

    scores = problem.scale * (q @ k.transpose(-2, -1)) + bias_matrix(problem, dtype)  # [B, H, Tq, Tk]
    seen = visible(problem)
    scores = scores.masked_fill(~seen, float("-inf"))
    # A row that sees no key would be 0/0: let it see everything, then take its output away.
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return (weights @ v).to(problem.q.dtype)


def _without_the_future(problem: Problem, keys: Tensor) -> Tensor:
    """Zero for keys that no query of their row may see, such as the unwritten end of a cache."""
    if not problem.causal or keys.shape[2] == 0 or problem.q.shape[2] == 0:
        return keys
    last = problem.positions()[:, -1]  # [B or 1]
    index = torch.arange(keys.shape[2], device=keys.device)
    unseen = index > last[:, None]  # [B or 1, Tk]
    return keys.masked_fill(unseen[:, None, :, None], 0.0)


def visible(problem: Problem) -> Tensor:
    """Which query may see which key: bool [B or 1, H or 1, Tq, Tk]."""
    key = torch.arange(problem.k.shape[2], device=problem.k.device)
    first, end = problem.key_runs()
    position = problem.positions()[:, None, :, None]
    in_run = ((key >= first[..., None]) & (key < end[..., None]))[:, None]  # [B or 1, 1, Tq, Tk]
    if problem.causal:
        return in_run & (key <= position)
    looks_back = torch.tensor([sight != "future" for sight in problem.sights], device=key.device)
    looks_ahead = torch.tensor([sight != "past" for sight in problem.sights], device=key.device)
    return in_run & (looks_back[:, None, None] | (key >= position)) & (looks_ahead[:, None, None] | (key <= position))


def bias_matrix(problem: Problem, dtype: torch.dtype) -> Tensor | float:
    """The bias of every pair, [B or 1, H, Tq, Tk]."""
    key = torch.arange(problem.k.shape[2], device=problem.k.device)
    distance = key - problem.positions()[:, None, :, None]  # [B or 1, 1, Tq, Tk]
    if isinstance(problem.bias, LinearBias):
        past, future = (slope[..., None, None] for slope in problem.slopes(dtype))  # [B or 1, H, 1, 1]
        return problem.bias.at(distance.to(dtype), past, future)
    if isinstance(problem.bias, BucketBias):
        return problem.bias.table.to(dtype)[problem.bias.bucket(distance)[:, 0]].permute(0, 3, 1, 2)
    return 0.0
