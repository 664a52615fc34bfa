"""The measure of every certificate: the softmax mass that a query really skips, in float64 from the very inputs.

`skipped` is that mass for any windows; `shares` compares the windows that `ts.certified_windows` gives at a tolerance
with it, and `visited` watches attention itself. `count` adds up how many query rows were compared over many calls
(generators.py makes them, on any device), and the worst of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.dense import Case, bias_of

FLOAT64_NOISE = 1e-9  # of summing a few thousand weights


def skipped(case: Case, spans: Sequence[Tensor]) -> list[Tensor]:
    """The mass of the keys in sight outside each of these spans of keys [B, H, Tq, 2]: float64 [B, H, Tq]."""
    batch, heads, queries, _ = case.q.shape
    group = heads // case.k.shape[1]
    masses = [torch.empty((batch, heads, queries), dtype=torch.float64, device=case.q.device) for _ in spans]
    bias = bias_of(case, torch.float64)
    assert isinstance(bias, Tensor)
    bias = bias.expand(batch, heads, -1, -1)
    for row in range(batch):
        for head in range(heads):
            seen = case.seen[row, head]
            key = case.k[row, head // group].double().masked_fill(~seen.any(0)[:, None], 0.0)
            scores = (case.true_scale * case.q[row, head].double()) @ key.T
            scores += bias[row, head]
            weights = torch.softmax(scores.masked_fill_(~seen, -torch.inf), dim=-1).nan_to_num_(nan=0.0)
            before = torch.nn.functional.pad(weights, (1, 0)).cumsum_(-1)  # [Tq, Tk + 1]
            after = torch.nn.functional.pad(weights.flip(-1), (1, 0)).cumsum_(-1).flip(-1)
            for mass, span in zip(masses, spans, strict=True):
                first, end = span[row, head, :, :1], span[row, head, :, 1:]
                mass[row, head] = (before.gather(-1, first) + after.gather(-1, end))[:, 0]
    return masses


def span_of(case: Case, windows: Tensor, block: int) -> Tensor:
    """Windows of key blocks by query block, as first and one-past-last key of each query: int64 [B, H, Tq, 2]."""
    limits = (windows.long() * block).clamp(max=case.k.shape[2])
    return limits.repeat_interleave(block, dim=2)[:, :, : case.q.shape[2]]


def shares(case: Case, blocks: Sequence[int], tolerances: Sequence[float]) -> dict[tuple[float, int], Tensor]:
    """For each tolerance and block what each query skips, as a share of the tolerance: [B, H, Tq]."""
    asked = [(tolerance, block) for tolerance in tolerances for block in blocks]
    spans = [span_of(case, replace(case, tolerance=t).windows(block), block) for t, block in asked]
    masses = skipped(case, spans)
    return {pair: mass / pair[0] for pair, mass in zip(asked, masses, strict=True)}


def assert_monotone(windows: Tensor) -> None:
    """Both borders rise with the query block, over the blocks that see any key; the others are (0, 0)."""
    for lane in windows.flatten(0, 1):
        empty = lane[:, 1] <= lane[:, 0]
        assert torch.equal(lane[empty], torch.zeros_like(lane[empty]))
        assert bool((lane[~empty].diff(dim=0) >= 0).all())


def visited(case: Case, backend: str, block: int = 128, recording: bool = False) -> Tensor:
    """Which key blocks attention gives any weight to, as seen from its output: bool [B, H, Tq, key blocks].

    Each value says which block it is from, so that the output is the weight of each block: nothing where the block
    was not visited. A weight that the number format cannot hold counts as not visited. recording: for a gradient.
    """
    batch, kv_heads, keys, dim = case.k.shape
    blocks = -(-keys // block)
    shown = []
    for first in range(0, blocks, dim):
        channel = torch.arange(keys, device=case.k.device) // block - first
        values = (channel[:, None] == torch.arange(dim, device=case.k.device)).to(case.v.dtype)
        q = case.q.detach().requires_grad_(recording)
        with torch.set_grad_enabled(recording):
            out = replace(case, q=q, v=values.expand(batch, kv_heads, -1, -1).contiguous()).attend(backend).detach()
        shown.append(out[..., : min(dim, blocks - first)] > 0)
    return torch.cat(shown, dim=-1)


def unvisited_mass(case: Case, backend: str, block: int = 128, recording: bool = False) -> Tensor:
    """The mass of the keys in sight that attention itself did not visit: [B, H, Tq]. Visited blocks must be a run."""
    seen = visited(case, backend, block, recording).int()
    blocks = seen.shape[-1]
    first = torch.where(seen.any(-1), seen.argmax(-1), 0)
    end = torch.where(seen.any(-1), blocks - seen.flip(-1).argmax(-1), 0)
    span = (torch.stack((first, end), dim=-1) * block).clamp(max=case.k.shape[2])
    return skipped(case, [span])[0]


@dataclass
class Count:
    """How many query rows had their skipped mass compared with the tolerance, and the worst share of it."""

    rows: int = 0
    certificates: int = 0  # the same rows at several block sizes
    worst: float = 0.0
    by: str = ""  # the call that the worst comes from

    def __str__(self) -> str:
        return f"{self.rows:,} query rows, {self.certificates:,} certificates, worst share {self.worst:.6f}"


def count(cases: Iterable[Case], blocks: Sequence[int] = (1, 16, 64, 128), asked: float = 1.0) -> Count:
    """Compare what every query of these cases skips with its tolerance. asked: for so many times the tolerance."""
    total = Count()
    for case in cases:
        if not 0.0 < case.may_skip * asked < 1.0:
            continue
        found = shares(case, blocks, [case.may_skip * asked])
        worst = max(float(share.max()) for share in found.values()) * asked
        total.rows += case.q.shape[:3].numel()
        total.certificates += sum(share.numel() for share in found.values())
        if not worst <= total.worst:  # NaN is the worst of all
            total.worst, total.by = worst, describe(case)
    return total


def describe(case: Case) -> str:
    """Shapes and plain values of a call."""
    fields = ((name, value) for name, value in vars(case).items() if value is not None and name != "seen")
    return ", ".join(f"{name}={list(v.shape) if isinstance(v, Tensor) else v}" for name, v in fields)
