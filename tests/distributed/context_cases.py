"""Sequences over several ranks for the tests of context parallelism, and what may be lost by skipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from trainshort.ops.bias import Bias

SPANS = [300, 200, 0, 50, 400, 3]
LENGTH = sum(SPANS)


@dataclass
class Case:
    """One call: its inputs, how a bias is made for a span of it, and the tensors of that bias to differentiate."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Callable[[slice], Bias | None]
    learned: list[Tensor] = field(default_factory=list)
    causal: bool = True
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    dropout: float = 0.0
    seed: int = 5

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.learned]

    def whole(self, tolerance: float = 0.0) -> Tensor:
        return ts.attention(
            self.q, self.k, self.v, bias=self.bias(slice(None)), causal=self.causal, tolerance=tolerance,
            key_padding_mask=self.mask, cu_seqlens=self.cu_seqlens, dropout=self.dropout, seed=self.seed,
        )  # fmt: skip


def slices(spans: list[int]) -> list[slice]:
    ends = [sum(spans[: rank + 1]) for rank in range(len(spans))]
    return [slice(end - length, end) for end, length in zip(ends, spans, strict=True)]


def _inputs(batch: int, heads: int, kv_heads: int, length: int, dim: int = 32) -> list[Tensor]:
    shapes = [(batch, heads, length, dim), *[(batch, kv_heads, length, dim)] * 2]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def _gates(batch: int, closed: list[tuple[int, int]]) -> Tensor:
    gates = F.logsigmoid(torch.randn(batch, 4, LENGTH, dtype=torch.float64) + 2)
    for head, token in closed:
        gates[0, head, token] = -torch.inf
    return gates.requires_grad_()


def _linear(slopes: Tensor, **options: object) -> tuple[Callable[[slice], Bias], list[Tensor]]:
    learned = [slopes.requires_grad_(), *(o for o in options.values() if isinstance(o, Tensor))]
    return (lambda own: ts.LinearBias(slopes, **options)), learned  # type: ignore[arg-type]


def make(name: str) -> Case:
    """The case of this name, float64, over the spans above."""
    slopes = ts.alibi_slopes(4).double()
    batch = 1 if "documents" in name else 2
    q, k, v = _inputs(batch, 4, 2 if "grouped" in name else 4, LENGTH)
    causal = "both sides" not in name
    bias, learned = _bias(name, slopes, causal)
    case = Case(q, k, v, bias, learned, causal)
    if "padding" in name:
        case.mask = torch.ones(2, LENGTH, dtype=torch.bool)
        case.mask[0, :350] = False
        case.mask[1, 520:] = False
        with torch.no_grad():
            for tensor in (k, v):
                tensor[~case.mask[:, None].expand(-1, tensor.shape[1], -1)] = torch.nan
    if "documents" in name:
        case.cu_seqlens = torch.tensor([0, 100, 280, 280, 520, 700, LENGTH])
    if "dropout" in name:
        case.dropout = 0.3
    if "long key" in name:
        with torch.no_grad():
            k[:, :, 5] *= 100
    return case


def _bias(name: str, slopes: Tensor, causal: bool) -> tuple[Callable[[slice], Bias | None], list[Tensor]]:
    if "no bias" in name:
        return (lambda own: None), []
    if "buckets" in name:
        table = torch.randn(32, 4, dtype=torch.float64, requires_grad=True)
        return (lambda own: ts.BucketBias(table)), [table]
    if "powers" in name:
        strengths, exponents = (torch.full((4,), value, dtype=torch.float64).requires_grad_() for value in (0.5, 0.8))
        return (lambda own: ts.KerpleBias(strengths, exponents, logarithmic=False)), [strengths, exponents]
    if "gates" in name:
        batch = 1 if "documents" in name or "shared" in name else 2
        past = _gates(batch, [(0, 0), (1, 300), (2, 499), (2, 550)])
        if causal:
            return (lambda own: ts.DecayBias(past[:, :, own])), [past]
        future = _gates(batch, [(1, 500), (2, 320)])
        return (lambda own: ts.DecayBias(past[:, :, own], future[:, :, own])), [past, future]
    if "times" in name:
        times = torch.randint(0, 3, (LENGTH,)).cumsum(-1) + 1_700_000_000_000_000_000  # nanoseconds since 1970
        slopes.requires_grad_()
        return (lambda own: ts.DecayBias.at(times[own], slopes)), [slopes]
    if "one way" in name:
        return (lambda own: ts.LinearBias.one_sided(slopes)), [slopes.requires_grad_()]
    if "future" in name:
        return _linear(torch.rand(2, 4).double() * 0.3, future=torch.rand(4).double().requires_grad_(), offset=0.5)
    if "slope 0" in name:
        return _linear(torch.tensor([0.0, 0.1, 0.5, 1.0]).double())
    return _linear(slopes)


NAMES = [
    "slopes", "slopes, both sides", "slopes and future, both sides", "slope 0", "grouped slopes",
    "one way, both sides", "gates", "grouped gates", "shared gates", "gates, both sides", "times",
    "times, both sides", "buckets", "powers", "no bias, both sides", "slopes with padding",
    "slopes with padding, both sides", "gates with padding", "slopes in documents",
    "slopes in documents, both sides", "gates in documents", "slopes and a long key", "slopes and dropout",
    "grouped gates with padding and dropout, both sides", "slopes in documents with dropout",
]  # fmt: skip


def promised(case: Case, grad: Tensor, tolerance: float) -> dict[str, float]:
    """What skipping may cost in all (docs/proof.md, What skipping can cost), for the worst case: of the output a
    row, of dq a row, of dk and dv added up over keys. Rounding of float64 besides."""
    real = [torch.nan_to_num(tensor.detach()) for tensor in (case.q, case.k, case.v)]
    q, k, v = (tensor.norm(dim=-1) for tensor in real)
    v, g = v / (1 - case.dropout), grad.norm(dim=-1)
    diameter, scale = 2 * v.max(), case.q.shape[3] ** -0.5
    rounding = 1e-9
    return {
        "out": float(tolerance * diameter) + rounding,
        "q": float(3 * tolerance * scale * g.max() * diameter * 2 * k.max()) + rounding,
        "k": float(3 * tolerance * scale * diameter * (g * q).sum()) + rounding,
        "v": float(2 * tolerance * g.sum() / (1 - case.dropout)) + rounding,
        "learned": float(3 * tolerance * diameter * g.sum() * 2 * LENGTH) + rounding,
    }
