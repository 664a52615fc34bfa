"""One token over rings of keys (rings.py): it is stored, attends, and leaves what its certificate needs.

In plain torch, for any device; on a CPU with torch's own kernel, one call for each run of heads. The kernels for a
GPU are in triton/ring.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from trainshort.ops.blocked import piece_kernels
from trainshort.ops.blocked.decode import LITTLE
from trainshort.ops.norms import row_norms
from trainshort.ops.rings import Rings, Run
from trainshort.ops.threads import one_thread


@dataclass(frozen=True)
class RingStep:
    """All that a token meets in one layer. Tensors that it writes to are marked so."""

    rings: Rings  # written
    slopes: Tensor  # float32 [H]
    scale: float
    tolerance: float  # softmax mass that may be skipped of the keys that are there
    place: Tensor  # int64 [1]: tokens before this one
    capacity: Tensor  # int64 [Hkv], like the next two: of each ring
    first: Tensor
    offset: Tensor
    center: Tensor  # [B, Hkv, D], float32 at least: taken from every key before it is measured
    longest: Tensor  # float32 [B, Hkv]: the largest norm so far; written
    before: Tensor  # float32 [B, Hkv]: the norm of the key that was overwritten; written
    x: Tensor  # float32 [B, H]: |scale| times the query's norm; written
    lse: Tensor  # [B, H]: the log-sum-exp of the query's scores, less scale q.c; written
    padding: Tensor | None = None  # int64 [B]: leading tokens of each row that are none
    most_padding: int = 0


class Lines:
    """The bias of the slots of rings, for any last slot: a slice of one line a head, [heads, G, 2 C - 1].

    Slot s of a ring whose last key lies in slot r is (r - s) mod C tokens away.
    """

    def __init__(self, slopes: Tensor, kv_heads: int, dtype: torch.dtype) -> None:
        """slopes: [H]."""
        self.slopes, self.dtype = slopes.unflatten(0, (kv_heads, -1)), dtype
        self.lines: dict[tuple[int, int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines.values())

    def bias(self, run: Run, last: int, slots: slice) -> Tensor:
        """[1, heads, G, slots]; last: the slot of the last key."""
        key = (run.heads.start, run.heads.stop, run.capacity)
        line = self.lines.get(key)
        if line is None:
            with torch.inference_mode(False):
                steps = torch.arange(run.capacity - 1, -run.capacity, -1, device=self.slopes.device) % run.capacity
                line = (-self.slopes[run.heads, :, None].double() * steps).to(self.dtype)[None]
            self.lines[key] = line
        shift = run.capacity - 1 - last
        return line[..., shift + slots.start : shift + slots.stop]

    def forget(self) -> None:
        self.lines.clear()


class Levels:
    """The bias of the slots of rings under gates: how much lower the level of the last token is than a slot's."""

    def __init__(self, rings: Rings, last: Tensor, dtype: torch.dtype) -> None:
        """last: float64 [B, H]."""
        self.rings, self.last, self.dtype = rings, last, dtype

    def bias(self, run: Run, last: int, slots: slice) -> Tensor:
        """[B, heads, G, slots]."""
        assert self.rings.levels is not None
        group = self.rings.levels.shape[2]
        levels = self.rings.slots_of(self.rings.levels, run)[:, :, slots].transpose(2, 3)
        own = self.last.unflatten(1, (-1, group))[:, run.heads, :, None]
        return (own - levels).to(self.dtype).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, step: RingStep, position: int, biases: Lines | Levels) -> Tensor:
    """Store k and v [B, Hkv, D], and return the output [B, H, D] of q over all keys there. position: as in place.

    Levels, where rings have them, are stored already.
    """
    rings = step.rings
    norms = lengths_above(k - step.center)
    torch.maximum(step.longest, norms, out=step.longest)
    slots = step.offset + step.place % step.capacity
    step.before.copy_(rings.norms.index_select(1, slots))
    for buffer, rows in ((rings.keys, k), (rings.values, v), (rings.norms, norms)):
        buffer.index_copy_(1, slots, rows)
    group = q.shape[1] // k.shape[1]
    read = sum(min(run.capacity, position + 1) * (run.heads.stop - run.heads.start) for run in rings.runs)
    with one_thread() if read * q.shape[0] * q.shape[2] <= LITTLE else nullcontext():
        parts = [
            _attend_run(q[:, run.heads.start * group : run.heads.stop * group], run, step, position, biases)
            for run in rings.runs
        ]
    outs, sums = zip(*parts, strict=True)
    step.x.copy_(lengths_above(q) * abs(step.scale))
    step.lse.copy_(torch.cat(sums, 1).flatten(1) - products(q[:, :, None], step.center)[..., 0] * step.scale)
    return torch.cat(outs, 1).flatten(1, 2)


def _attend_run(q: Tensor, run: Run, step: RingStep, position: int, biases: Lines | Levels) -> tuple[Tensor, Tensor]:
    """Output [B, heads, G, D] and log-sum-exp [B, heads, G] of a run's queries."""
    q = q.unflatten(1, (run.heads.stop - run.heads.start, -1))
    keys, values = (step.rings.slots_of(buffer, run) for buffer in (step.rings.keys, step.rings.values))
    low, last = run.low(position + 1), position % run.capacity
    first = low % run.capacity
    wrapped = position + 1 - low < run.capacity and first > last
    fused = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and piece_kernels.has_fused()
    if fused and not wrapped and step.most_padding <= low:
        slots = slice(0, run.capacity) if position + 1 - low == run.capacity else slice(first, last + 1)
        bias = biases.bias(run, last, slots)
        if isinstance(biases, Lines) or not bool(torch.isinf(bias).any()):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, keys[:, :, slots], values[:, :, slots], 0.0, False, attn_mask=bias, scale=step.scale
            )
    there = _there(run, step, position)
    bias = biases.bias(run, last, slice(0, run.capacity))
    return _attend_masked(q, keys, values, bias.masked_fill(~there[:, None, None], float("-inf")), step.scale)


def _there(run: Run, step: RingStep, position: int) -> Tensor:
    """Which slots hold a key of this row's text: bool [B or 1, C]."""
    slots = torch.arange(run.capacity, device=step.place.device)
    index = position - (position - slots) % run.capacity  # of the key in each slot
    there = (index >= run.low(position + 1))[None]
    return there if step.padding is None else there & (index >= step.padding[:, None])


def _attend_masked(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same in plain operations, where some slots hold nothing that a row may see."""
    dtype = bias.dtype
    scores = q.to(dtype) @ keys.to(dtype).transpose(-1, -2) * scale + bias
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]) @ values.to(dtype)).to(q.dtype), lse


def lengths_above(rows: Tensor) -> Tensor:
    """Norms of rows in float32, never less than they are: of differences too, each of which is rounded once."""
    return row_norms(rows).float() * (1.0 + (rows.shape[-1] + 8) * 2.0**-23)


def products(q: Tensor, center: Tensor) -> Tensor:
    """Inner products of queries [B, H, T, D] with their head's vector [B, Hkv, D]: [B, H, T]. No matrix product,
    which may round more than float32 does."""
    return (q.unflatten(1, (center.shape[1], -1)) * center[:, :, None, None]).sum(-1).flatten(1, 2)
