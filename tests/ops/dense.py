"""Dense attention in float64, written from the formula and from nothing in `trainshort`: the measure of all backends.

    score[i, j] = scale * q[i] . k[j] + bias(i, j)        where query i may see key j, else -inf
    output[i]   = sum over j of softmax(score[i])[j] * factor[i, j] * v[j]        the factor: of the dropout, else 1

A `Case` is one call of attention with every argument that changes what is computed. `exact` differentiates the
formula in float64; `native` does the same arithmetic in float32, and so shows what the number format itself
loses; `case.run` asks a backend. `keep` restricts the formula to a kept set of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import trainshort as ts
from trainshort.ops import attention

Results = dict[str, Tensor]  # "out", and the gradient of each of LEAVES that is there
LEAVES = ("q", "k", "v", "slopes", "future", "table", "log_gates", "future_gates", "strengths", "exponents")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    q: Tensor  # [B, H, Tq, D]
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, D]
    slopes: Tensor | None = None  # [H] or [B, H]; without slopes and table there is no bias
    future: Tensor | None = None  # [H] or [B, H]
    offset: float = 0.0
    sees: Sequence[str] | None = None
    table: Tensor | None = None  # [buckets, H]
    max_distance: int = 128
    bidirectional: bool = False
    log_gates: Tensor | None = None  # [B or 1, H, Tk]
    future_gates: Tensor | None = None  # [B or 1, H, Tk]
    times: Tensor | None = None  # [Tk] or [B, Tk], with slopes
    strengths: Tensor | None = None  # [H], with exponents [H]
    exponents: Tensor | None = None
    logarithmic: bool = True
    causal: bool = True
    scale: float | None = None
    tolerance: float | None = None
    key_padding_mask: Tensor | None = None  # [B, Tk]
    cu_seqlens: Tensor | None = None  # [documents + 1]
    query_start: int | Tensor | None = None
    key_norms: Tensor | None = None
    dropout: float = 0.0
    dropout_seed: int = 0

    @cached_property
    def factors(self) -> Tensor | float:
        """What dropout multiplies each weight by: float64 [B, H, Tq, Tk]."""
        if not self.dropout:
            return 1.0
        shape = (*self.q.shape[:3], self.k.shape[2])
        return dropout_factors(self.dropout_seed, shape, self.dropout).to(self.q.device)

    @cached_property
    def seen(self) -> Tensor:
        """Which query may see which key, bool [B, H, Tq, Tk]."""
        return in_sight(self)

    @property
    def bias(self) -> ts.LinearBias | ts.BucketBias | ts.DecayBias | ts.KerpleBias | None:
        if self.log_gates is not None:
            return ts.DecayBias(self.log_gates, self.future_gates)
        if self.slopes is not None and self.times is not None:
            return ts.DecayBias.at(self.times, self.slopes)
        if self.slopes is not None:
            return ts.LinearBias(self.slopes, future=self.future, offset=self.offset, sees=self.sees)
        if self.table is not None:
            return ts.BucketBias(self.table, self.max_distance, self.bidirectional)
        if self.strengths is not None and self.exponents is not None:
            return ts.KerpleBias(self.strengths, self.exponents, self.logarithmic)
        return None

    @property
    def true_scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale

    @property
    def may_skip(self) -> float:
        """The softmax mass that a query may skip, as the contract has it."""
        power = self.strengths is not None and not self.logarithmic
        if self.slopes is None and self.log_gates is None and not power:
            return 0.0
        if self.tolerance is not None:
            return self.tolerance
        return {torch.float64: 0.0, torch.float32: 2.0**-24}.get(self.q.dtype, 2.0**-14)

    def arguments(self) -> dict:
        return {
            "causal": self.causal,
            "scale": self.scale,
            "tolerance": self.tolerance,
            "key_padding_mask": self.key_padding_mask,
            "cu_seqlens": self.cu_seqlens,
            "query_start": self.query_start,
            "key_norms": self.key_norms,
        }

    def dropped(self) -> dict:
        return {"dropout": self.dropout, "seed": self.dropout_seed} if self.dropout else {}

    def attend(self, backend: str) -> Tensor:
        return attention(
            self.q, self.k, self.v, bias=self.bias, backend=backend, **self.arguments(), **self.dropped()
        )

    def run(self, backend: str) -> Results:
        return differentiate(self, lambda case: case.attend(backend))

    def windows(self, block: int = 128) -> Tensor:
        return ts.certified_windows(self.q, self.k, bias=self.bias, block=block, **self.arguments())

    def kept(self, block: int = 128) -> Tensor:
        """The pairs that certified windows keep: bool [B, H, Tq, Tk]."""
        windows = self.windows(block).repeat_interleave(block, dim=2)[:, :, : self.q.shape[2]]  # [B, H, Tq, 2]
        key_block = torch.arange(self.k.shape[2], device=self.k.device) // block
        return (key_block >= windows[..., :1]) & (key_block < windows[..., 1:])

    def upstream(self) -> Tensor:
        """A gradient of the output, the same for everyone who asks."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.q.shape, generator=generator).to(self.q.dtype).to(self.q.device)


def differentiate(case: Case, forward: Callable[[Case], Tensor], dtype: torch.dtype | None = None) -> Results:
    """Output and all gradients of `forward`, with the case's tensors converted to `dtype` first, if given."""
    leaves = _leaves(case, dtype)
    out = forward(replace(case, **leaves))
    upstream = case.upstream().to(out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def _leaves(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    found = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    return {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in found.items()}


def exact(case: Case, keep: Tensor | None = None) -> Results:
    """Everything in float64, from the very numbers that the case holds."""
    return differentiate(case, lambda c: dense(c, torch.float64, keep)[0], torch.float64)


def native(case: Case, keep: Tensor | None = None) -> Results:
    """Everything in float32, results rounded to the dtype of the inputs: what the format loses by itself.

    The backward pass is the usual one, dscore = weight * (dweight - dout . out), with `out` as it was returned.
    """
    leaves = _leaves(case)
    case = replace(case, **leaves)
    scores, blind = scores_of(case, torch.float32, keep)
    weights = torch.softmax(scores.detach(), dim=-1).masked_fill(blind, 0.0)
    value = values_of(case, torch.float32)
    upstream = case.upstream().float()
    dropped = (weights * case.factors).float()
    rounded = (dropped @ value).to(case.q.dtype).detach()
    dweights = upstream @ value.detach().transpose(-2, -1) * case.factors
    dscores = weights * (dweights - (upstream * rounded.float()).sum(-1, keepdim=True))
    others = [name for name in leaves if name != "v"]
    given = dscores.float()
    gradients = torch.autograd.grad(scores, [leaves[name] for name in others], given, materialize_grads=True)
    (dvalue,) = torch.autograd.grad(dropped @ value, [leaves["v"]], upstream)
    return {"out": rounded, "v": dvalue, **dict(zip(others, gradients, strict=True))}


def dense(case: Case, dtype: torch.dtype = torch.float64, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, D] and softmax weights [B, H, Tq, Tk]. keep: bool [B, H, Tq, Tk], all in sight if None.

    The weights are those before dropout.
    """
    scores, blind = scores_of(case, dtype, keep)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
    return (weights * case.factors).to(dtype) @ values_of(case, dtype), weights


def scores_of(case: Case, dtype: torch.dtype, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scores [B, H, Tq, Tk], and which queries see nothing [B, H, Tq, 1]: their scores are 0."""
    seen = case.seen if keep is None else case.seen & keep
    blind = ~seen.any(-1, keepdim=True)
    k = _looked_at(case, case.k.to(dtype))
    scores = case.true_scale * (case.q.to(dtype) @ k.transpose(-2, -1)) + bias_of(case, dtype)
    return scores.masked_fill(~seen, -math.inf).masked_fill(blind, 0.0), blind


def values_of(case: Case, dtype: torch.dtype) -> Tensor:
    """One value for each query head and key, [B, H, Tk, D]."""
    return _looked_at(case, case.v.to(dtype))


def _looked_at(case: Case, keys: Tensor) -> Tensor:
    """Repeated for the heads of a group, and zero where nobody looks: what stands there does not count."""
    seen = case.seen.any(2).any(1)[:, None, :, None]  # [B, 1, Tk, 1]
    return keys.masked_fill(~seen, 0.0).repeat_interleave(case.q.shape[1] // keys.shape[1], dim=1)


def distances(case: Case) -> Tensor:
    """Position of the key minus position of the query, int64 [B or 1, Tq, Tk]."""
    queries, keys, device = case.q.shape[2], case.k.shape[2], case.q.device
    start = keys - queries if case.query_start is None else case.query_start
    start = torch.as_tensor(start, device=device).reshape(-1, 1, 1)
    query = start + torch.arange(queries, device=device)[:, None]
    return torch.arange(keys, device=device) - query


def in_sight(case: Case) -> Tensor:
    batch, heads, queries, _ = case.q.shape
    distance = distances(case)[:, None]  # [B or 1, 1, Tq, Tk]
    seen = torch.ones((batch, heads, queries, case.k.shape[2]), dtype=torch.bool, device=case.q.device)
    if case.causal:
        seen = seen & (distance <= 0)
    for head, sight in enumerate(case.sees or ()):
        if sight == "past":
            seen[:, head] &= distance[:, 0] <= 0
        if sight == "future":
            seen[:, head] &= distance[:, 0] >= 0
    if case.key_padding_mask is not None:
        seen = seen & case.key_padding_mask[:, None, None]
    if case.cu_seqlens is not None:
        token = torch.arange(queries, device=case.q.device)
        document = (token[:, None] >= case.cu_seqlens[1:]).sum(-1)
        seen = seen & (document[:, None] == document)
    if case.log_gates is not None:
        seen = seen & ~behind_a_border(case)
    return seen


def behind_a_border(case: Case) -> Tensor:
    """Where a gate of zero lies between a query and a key: bool [B or 1, H, Tq, Tk]. A query in padding stands at the
    nearest real key for that."""
    assert case.log_gates is not None
    closed = torch.isneginf(case.log_gates).long().cumsum(-1)
    hidden = at_queries(case, closed, real=True)[..., None] > closed[:, :, None]
    if case.future_gates is not None:
        closed = torch.isneginf(case.future_gates).long().cumsum(-1)
        hidden = hidden | (at_queries(case, closed, real=True)[..., None] < closed[:, :, None])
    return hidden


def at_queries(case: Case, values: Tensor, real: bool = False) -> Tensor:
    """Numbers of the keys [B or 1, H, Tk] at the places of the queries, or at the nearest key: [B, H, Tq]. real: at
    the nearest that is no padding."""
    batch, heads, queries, _ = case.q.shape
    keys = case.k.shape[2]
    if keys == 0:
        return values.new_zeros((batch, heads, queries))
    position = (-distances(case)[..., 0]).expand(batch, -1)  # [B, Tq]
    first, last = torch.zeros_like(position), torch.full_like(position, keys - 1)
    if real and case.key_padding_mask is not None:
        mask = case.key_padding_mask.long()
        first = mask.argmax(-1)[:, None].expand_as(position)
        last = (first + mask.sum(-1)[:, None] - 1).clamp_min(0)
    place = torch.maximum(torch.minimum(position, last), first)[:, None].expand(-1, heads, -1)
    return values.expand(batch, heads, keys).gather(2, place)


def bias_of(case: Case, dtype: torch.dtype) -> Tensor | float:
    """What is added to each score, [B or 1, H, Tq, Tk]."""
    distance = distances(case)[:, None]  # [B or 1, 1, Tq, Tk]
    if case.log_gates is not None:
        bias = crossed(case, case.log_gates)
        if case.future_gates is not None:
            bias = torch.where(distance > 0, -crossed(case, case.future_gates), bias)
        return bias.to(dtype)
    if case.slopes is not None and case.times is not None:
        since = (case.times - case.times[..., :1]).double().reshape(-1, 1, case.k.shape[2])
        gap = at_queries(case, since.expand(-1, case.q.shape[1], -1))[..., None] - since[:, :, None]
        return (-torch.atleast_2d(case.slopes).double()[..., None, None] * gap.abs()).to(dtype)
    if case.slopes is not None:
        past = torch.atleast_2d(case.slopes).to(dtype)[..., None, None]  # [B or 1, H, 1, 1]
        future = past if case.future is None else torch.atleast_2d(case.future).to(dtype)[..., None, None]
        steps = distance.to(dtype)
        return torch.where(distance > 0, -future * (steps - case.offset), past * steps)
    if case.table is not None:
        bucket = t5_bucket(distance[:, 0], case.table.shape[0], case.max_distance, case.bidirectional)
        return case.table.to(dtype)[bucket].movedim(-1, 1)
    if case.strengths is not None and case.exponents is not None:
        a, p = (numbers.to(dtype)[:, None, None] for numbers in (case.strengths, case.exponents))
        steps = distance.abs().to(dtype)
        return -p * torch.log(1.0 + a * steps) if case.logarithmic else -a * torch.pow(steps, p)
    return 0.0


def crossed(case: Case, log_gates: Tensor) -> Tensor:
    """Sum of the open log gates after key j up to query i, with the sign of i - j: float64 [B, H, Tq, Tk]."""
    sums = log_gates.double().masked_fill(torch.isneginf(log_gates), 0.0).cumsum(-1)
    return at_queries(case, sums)[..., None] - sums[:, :, None]


def t5_bucket(relative_position: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The rule of T5, as published: mesh_tensorflow's `_relative_position_bucket`."""
    n = -relative_position
    result = torch.zeros_like(n)
    if bidirectional:
        num_buckets //= 2
        result = result + (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    max_exact = num_buckets // 2
    logarithm = torch.log(n.clamp(min=1).float() / max_exact) / math.log(max_distance / max_exact)
    large = (max_exact + (logarithm * (num_buckets - max_exact)).long()).clamp(max=num_buckets - 1)
    return result + torch.where(n < max_exact, n, large)


def dropout_factors(seed: int, shape: tuple[int, ...], dropout: float) -> Tensor:
    """What the contract says of dropout, in numpy's own 32 bits: float64 [B, H, Tq, Tk], on a CPU."""

    def mixed(x: np.ndarray, between: np.ndarray | None = None) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = (x if between is None else x ^ between) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    word = np.array([seed % 2**64], dtype=np.uint64)
    low, high = (word & np.uint64(0xFFFFFFFF)).astype(np.uint32), (word >> np.uint64(32)).astype(np.uint32)
    one = mixed(low ^ np.uint32(0x9E3779B9))
    two = mixed(high ^ np.uint32(0x85EBCA6B) ^ one)
    row, head, query, key = np.ogrid[tuple(slice(size) for size in shape)]
    for index in (row, head, query):
        one, two = mixed(one ^ index.astype(np.uint32)), mixed(two ^ index.astype(np.uint32))
    drawn = mixed(one ^ key.astype(np.uint32), two) >> np.uint32(1)
    threshold = round(dropout * 2**31)
    return torch.from_numpy((drawn >= threshold) / (1.0 - threshold / 2**31))
