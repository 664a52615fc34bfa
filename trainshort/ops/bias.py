"""What attention adds to its scores: descriptions of a bias, never a length x length tensor.

Every bias here depends on the distance between a query and a key alone, so each class answers one
question: what is the bias at these distances? `distance` is always key position - query position:
zero on the diagonal, negative for the past, positive for the future.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Sight = Literal["past", "future", "both"]


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The paper's slopes, one a head, float32 [num_heads].

    For a power of two, 2^(-8h/H) for h = 1..H. Otherwise the slopes of the largest power of two c
    below H, followed by every second slope of 2c, starting with its first.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, (int, torch.SymInt)):
        raise TypeError(f"num_heads must be an int, got {type(num_heads).__name__}")
    num_heads = int(num_heads)
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    closest = 1 << (num_heads.bit_length() - 1)
    # Computed where they are needed, not copied there, so that a CUDA graph can capture it.
    index = torch.arange(num_heads, device=device)
    head = index.to(torch.float32 if index.device.type == "mps" else torch.float64)
    steps = torch.where(head < closest, head + 1, head - closest + 0.5)  # -8/c of these is the exponent
    return torch.exp2(steps * (-8.0 / closest)).to(torch.float32)


LOG2E = math.log2(math.e)


class KernelBias(NamedTuple):
    """A bias as the Triton kernels read it. Tensors are None where a bias of this kind has none."""

    kind: int  # the kernels' BIAS: which of the following they read
    slopes: Tensor | None = None  # float32 [H] or [B, H], like the next
    futures: Tensor | None = None
    line: Tensor | None = None  # float32 [H, 2 max_distance + 1]: the bias by distance, in units of log2
    buckets: Tensor | None = None  # int32 [2 max_distance + 1]: the bucket of each distance
    by_row: bool = False  # slopes [B, H]
    offset: float = 0.0
    max_distance: int = 0
    bucket_count: int = 1


NO_BIAS, LINEAR, BUCKET = 0, 1, 2  # KernelBias.kind


def _for_kernels(slopes: Tensor) -> Tensor:
    """Float32, contiguous, at an address that is a multiple of 16."""
    slopes = slopes.detach().float().contiguous()
    return slopes if slopes.data_ptr() % 16 == 0 else slopes.clone()


def fold_gradient(gradient: Tensor, slopes: Tensor) -> Tensor:
    """A gradient [B, H] in the shape and dtype of the slopes it belongs to."""
    return (gradient if slopes.dim() == 2 else gradient.sum(0)).to(slopes.dtype)


@dataclass(frozen=True, eq=False)
class LinearBias:
    """ALiBi: a penalty that grows linearly with distance, with a slope for each head.

    The bias of a key `d` steps in the past is `-slopes * d`; one `d` steps in the future costs
    `future * (d - offset)`, with `future = slopes` unless given. `sees` says for each head which way it
    looks ("past", "future" or "both"; the query's own position is always in sight).

    slopes: [H] or [B, H], positive. A gradient flows to `slopes` and `future` if they ask for one.
    """

    slopes: Tensor
    future: Tensor | None = None
    offset: float = 0.0
    sees: Sequence[Sight] | None = None

    learned = ("slopes", "future")
    certifiable = True

    def for_kernels(self, batch: int) -> KernelBias:
        slopes = _for_kernels(self.slopes)
        futures = slopes if self.future is None else _for_kernels(self.future)
        if futures.dim() != slopes.dim():
            shape = (batch, slopes.shape[-1])
            slopes, futures = slopes.expand(shape).contiguous(), futures.expand(shape).contiguous()
        return KernelBias(LINEAR, slopes, futures, by_row=slopes.dim() == 2, offset=float(self.offset))

    def kernel_gradients(self, past: Tensor, future: Tensor, table: Tensor) -> dict[str, Tensor]:
        if self.future is None:
            return {"slopes": fold_gradient(past + future, self.slopes)}
        return {"slopes": fold_gradient(past, self.slopes), "future": fold_gradient(future, self.future)}

    def __post_init__(self) -> None:
        for name in ("slopes", "future"):
            value = getattr(self, name)
            if value is None and name == "future":
                continue
            if not isinstance(value, Tensor):
                raise TypeError(f"LinearBias {name} must be a tensor, got {type(value).__name__}")
            if not value.is_floating_point():
                raise TypeError(f"LinearBias {name} must be a floating point tensor, got {value.dtype}")
            if value.dim() not in (1, 2):
                raise ValueError(
                    f"LinearBias {name} must be [heads] or [batch, heads], got shape {list(value.shape)}"
                )
        if not 0.0 <= self.offset <= 1.0:
            raise ValueError(f"LinearBias offset must lie in [0, 1], got {self.offset}")
        if self.sees is not None:
            strangers = sorted(set(self.sees) - {"past", "future", "both"})
            if strangers:
                raise ValueError(f"LinearBias sees must hold 'past', 'future' or 'both', got {strangers[0]!r}")
            if len(self.sees) != self.slopes.shape[-1]:
                raise ValueError(
                    f"LinearBias sees must name one direction a head: {self.slopes.shape[-1]} heads, "
                    f"got {len(self.sees)} entries"
                )
            object.__setattr__(self, "sees", tuple(self.sees))

    @classmethod
    def one_sided(cls, slopes: Tensor) -> LinearBias:
        """For encoders: the first half of the heads sees the past, the second half the future."""
        heads = slopes.shape[-1]
        past = (heads + 1) // 2
        sees: list[Sight] = ["past" if head < past else "future" for head in range(heads)]
        return cls(slopes, sees=sees)

    @property
    def is_causal_only(self) -> bool:
        """True where nothing is said of the future, so that the description also fits causal attention."""
        return self.future is None and self.offset == 0.0 and self.sees is None

    def part(self, rows: slice, heads: slice) -> LinearBias:
        """The bias of some heads in some rows of the batch."""

        def part_of(slopes: Tensor) -> Tensor:
            return slopes[heads] if slopes.dim() == 1 else slopes[rows, heads]

        return LinearBias(
            part_of(self.slopes),
            future=None if self.future is None else part_of(self.future),
            offset=self.offset,
            sees=None if self.sees is None else self.sees[heads],
        )

    # How far from the query the bias stops being the sum of a term of the query and a term of the key.
    separable_beyond = 0

    def at(self, distance: Tensor, past: Tensor, future: Tensor) -> Tensor:
        """The bias at `distance` (broadcast against the slopes given, in their dtype)."""
        ahead = future * (self.offset - distance)
        return torch.where(distance > 0, ahead, past * distance)


@dataclass(frozen=True, eq=False)
class BucketBias:
    """T5's bias: one learned number for each head and each bucket of distances.

    table: [num_buckets, H]. Short distances have a bucket each, longer ones share buckets that grow
    logarithmically up to `max_distance`; everything beyond falls into the last. With `bidirectional`
    (encoders) half of the buckets serve the future; otherwise the future counts as distance zero.
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = False

    learned = ("table",)
    certifiable = False

    def for_kernels(self, batch: int) -> KernelBias:
        index = self.bucket(torch.arange(-self.max_distance, self.max_distance + 1, device=self.table.device))
        line = (self.table.detach().float()[index].T * LOG2E).contiguous()
        return KernelBias(
            BUCKET,
            line=line,
            buckets=index.to(torch.int32),
            max_distance=self.max_distance,
            bucket_count=self.table.shape[0],
        )

    def kernel_gradients(self, past: Tensor, future: Tensor, table: Tensor) -> dict[str, Tensor]:
        return {"table": table.sum(0).T[: self.table.shape[0]].to(self.table.dtype).contiguous()}

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor):
            raise TypeError(f"BucketBias table must be a tensor, got {type(self.table).__name__}")
        if not self.table.is_floating_point():
            raise TypeError(f"BucketBias table must be a floating point tensor, got {self.table.dtype}")
        if self.table.dim() != 2:
            raise ValueError(f"BucketBias table must be [num_buckets, heads], got shape {list(self.table.shape)}")
        buckets = self.table.shape[0]
        if buckets < 2 or (self.bidirectional and (buckets < 4 or buckets % 2)):
            least = "an even number of at least 4" if self.bidirectional else "at least 2"
            raise ValueError(f"BucketBias table needs {least} buckets, got {buckets}")
        exact = buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            raise ValueError(
                f"BucketBias max_distance must exceed the {exact} distances that have a bucket of their own, "
                f"got {self.max_distance}"
            )

    def part(self, rows: slice, heads: slice) -> BucketBias:
        """The bias of some heads, the same in all rows of the batch."""
        return replace(self, table=self.table[:, heads])

    @property
    def separable_beyond(self) -> int:
        return self.max_distance

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (int64)."""
        buckets = self.table.shape[0]
        offset = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset = (distance > 0).to(distance.dtype) * buckets
            steps = distance.abs()
        else:
            steps = (-distance).clamp_min(0)
        exact = buckets // 2
        # The same float32 arithmetic as the published code, so that borders fall on the same distance.
        ratio = torch.log(steps.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        coarse = exact + (ratio * (buckets - exact)).to(torch.int64)
        return offset + torch.where(steps < exact, steps, coarse.clamp_max(buckets - 1))


Bias = LinearBias | BucketBias | None


def learned(bias: Bias) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What of a bias can have a gradient: slopes, future slopes and table."""
    if isinstance(bias, LinearBias):
        return bias.slopes, bias.future, None
    return None, None, bias.table if isinstance(bias, BucketBias) else None
