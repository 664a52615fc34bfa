"""What attention adds to its scores: descriptions of a bias, never a length x length tensor.

`Bias` lists what attention asks of a bias. Those of this file depend on the distance between a query and a key alone:
`distance` is always key position - query position, zero on the diagonal, negative for the past, positive for the
future. DecayBias (decay.py) depends on both places; biases.py lists all classes. Their fields become arguments of the
registered operators (operators.py), so their annotations are limited to those of `FIELD_TYPES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

Sight = Literal["past", "future", "both"]
SIGHTS: tuple[Sight, ...] = ("past", "future", "both")


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The paper's slopes, one a head, float32 [num_heads].

    For a power of two, 2^(-8h/H) for h = 1..H. Otherwise the slopes of the largest power of two c
    below H, followed by every second slope of 2c, starting with its first.

    Args:
        num_heads: H, any positive number.
        device: Where to make them; None: torch's default.

    Returns:
        The slopes, float32 [num_heads].

    Example:
        >>> ts.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
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


LARGEST_SLOPE = 2.0**64  # times any distance, float32 still holds it
LOG2E = math.log2(math.e)

# What a field of a bias may be, as an argument of the registered operators.
FIELD_TYPES = {
    "Tensor": "Tensor?",
    "Tensor | None": "Tensor?",
    "float": "float?",
    "int": "SymInt?",
    "bool": "bool?",
    "Sequence[Sight] | None": "int[]?",
}


class KernelBias(NamedTuple):
    """A bias as the Triton kernels read it. Tensors are None where a bias of this kind has none."""

    kind: int  # the kernels' BIAS: which of the following they read
    slopes: Tensor | None = None  # float32 [H] or [B, H], like the next
    futures: Tensor | None = None
    line: Tensor | None = None  # float32 [H, 2 max_distance + 1]: the bias by distance, in units of log2
    buckets: Tensor | None = None  # int32 [2 max_distance + 1]: the bucket of each distance
    levels: Tensor | None = None  # of a decay: c for earlier keys, float64 [B or 1, H, T], laid out as the next three
    ahead: Tensor | None = None  # c for later keys
    gate_first: Tensor | None = None  # int32: the first key that each position may see; None for times
    ahead_end: Tensor | None = None  # int32: one past the last
    by_row: bool = False  # slopes [B, H]
    offset: float = 0.0
    max_distance: int = 0
    bucket_count: int = 1

    @property
    def level_strides(self) -> tuple[int, int]:
        """Of levels and what is laid out as they are: by row of the batch, and by head."""
        if self.levels is None:
            return 0, 0
        return self.levels.stride(0) if self.levels.shape[0] > 1 else 0, self.levels.stride(1)


NO_BIAS, LINEAR, BUCKET, DECAY = 0, 1, 2, 3  # KernelBias.kind


class Bias:
    """What attention asks of a bias. Methods that raise are for each class to define."""

    learned: ClassVar[tuple[str, ...]]  # the fields that are differentiable if they require grad
    by_distance: ClassVar[bool] = True  # whether it depends on the distance alone
    has_kernels: ClassVar[bool] = True  # whether the Triton kernels know it

    @classmethod
    def from_fields(cls, **values: Any) -> Self:
        """The bias with these fields."""
        return cls(**values)

    @property
    def certifiable(self) -> bool:
        """Whether windows.py can prove from it which keys may be skipped."""
        return False

    @property
    def separable_beyond(self) -> int:
        """How far from the query the bias becomes the sum of a term of the query and a term of the key."""
        return 0

    @property
    def differs_by_row(self) -> bool:
        """Whether rows of the batch have a bias of their own."""
        return False

    def sights(self, heads: int) -> tuple[Sight, ...]:
        """Which way each head looks in attention that is not causal."""
        return _look_both_ways(heads)

    def check_shapes(self, q: Tensor, k: Tensor, causal: bool) -> None:
        """Refuse a bias that does not go with these queries and keys. Never looks inside a tensor."""
        raise NotImplementedError

    def both_ways(self) -> Self:
        """The same bias with all heads looking to both sides, for attention from one sequence to another."""
        return self

    def positive(self) -> dict[str, Tensor]:
        """The tensors whose numbers must be positive and at most LARGEST_SLOPE."""
        return {}

    def not_negative(self) -> dict[str, Tensor]:
        """Those whose numbers may be 0 as well."""
        return {}

    def without_nan(self) -> dict[str, tuple[Tensor, str]]:
        """What is required of numbers that a user gave -> a tensor [..., T] with NaN from the first on that is
        refused, and what is wrong with that one, with {} for its position."""
        return {}

    def part(self, rows: slice, heads: slice, keys: slice = slice(None)) -> Self:
        """The bias of some heads in some rows of the batch, for some of the keys and queries at their places."""
        raise NotImplementedError

    def between(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias of keys for queries at positions int64 [B or 1, 1, ...], for every head: [B or 1, H, ...]."""
        return self.at_distance(key - query, dtype)

    def at_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias at distances int64 [B or 1, 1, ...], for every head, where it depends on them alone."""
        raise NotImplementedError

    def hides(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Where a key in sight is hidden from a query: bool, as `between`; None for nowhere."""
        return None

    def query_shift(self, away: Tensor, ahead: bool) -> Tensor | None:
        """What the bias of all keys on one side, beyond `separable_beyond`, loses for queries that stand `away` [R]
        steps further from them: [B or 1, H, R]; None for nothing. ahead: the keys lie in the future."""
        return None

    def gradient_sums(self, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros [B, H, ...] in which `add_gradients` sums up."""
        raise NotImplementedError

    def add_gradients(
        self, sums: dict[str, Tensor], rows: slice, heads: slice, by_distance: Tensor, distance: Tensor
    ) -> None:
        """Add the gradients of scores, summed by distance [rows, heads, W] at distances [W]."""
        raise NotImplementedError

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of the learned fields, in their shapes and dtypes. The Triton kernels bring sums of their
        own: "past" and "future" [B, H], "table" [B, H, at least the buckets]."""
        raise NotImplementedError

    def for_kernels(self, batch: int) -> KernelBias:
        """The bias as the Triton kernels read it."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """The same bias on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return self.from_fields(
            **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
        )


@dataclass(frozen=True, eq=False)
class LinearBias(Bias):
    """ALiBi: a penalty that grows linearly with distance, with a slope for each head.

    The bias of a key `d` steps in the past is `-slopes * d`; one `d` steps in the future costs
    `future * (d - offset)`, with `future = slopes` unless given. `sees` says for each head which way it
    looks ("past", "future" or "both"; the query's own position is always in sight).

    Args:
        slopes: [H] or [B, H], at least 0; a head of slope 0 sees everything alike, and skips nothing. Differentiable
            if it requires grad, like `future`.
        future: The slopes of the future, like `slopes`; None: the same.
        offset: Between 0 and 1: the distance by which the future is nearer.
        sees: For each head "past", "future" or "both"; None: as `causal` says.

    Example:
        >>> out = ts.attention(q, k, v, bias=ts.LinearBias(ts.alibi_slopes(8)), causal=False)
    """

    slopes: Tensor
    future: Tensor | None = None
    offset: float = 0.0
    sees: Sequence[Sight] | None = None

    learned = ("slopes", "future")

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
        """For encoders: the first half of the heads sees the past, the second half the future.

        Args:
            slopes: As for `LinearBias`.

        Returns:
            The bias.

        Example:
            >>> bias = ts.LinearBias.one_sided(ts.alibi_slopes(8))
            >>> out = ts.attention(q, k, v, bias=bias, causal=False)
        """
        heads = slopes.shape[-1]
        past = (heads + 1) // 2
        sees: list[Sight] = ["past" if head < past else "future" for head in range(heads)]
        return cls(slopes, sees=sees)

    @property
    def certifiable(self) -> bool:
        return True

    @property
    def is_causal_only(self) -> bool:
        """True where nothing is said of the future, so that the description also fits causal attention."""
        return self.future is None and self.offset == 0.0 and self.sees is None

    @property
    def differs_by_row(self) -> bool:
        return self.slopes.dim() == 2 or (self.future is not None and self.future.dim() == 2)

    def sights(self, heads: int) -> tuple[Sight, ...]:
        return _look_both_ways(heads) if self.sees is None else tuple(self.sees)

    def check_shapes(self, q: Tensor, k: Tensor, causal: bool) -> None:
        batch, heads = q.shape[:2]
        for name, slopes in (("slopes", self.slopes), ("future", self.future)):
            if slopes is None:
                continue
            if slopes.device != q.device:
                raise ValueError(f"{name} must be on q's device {q.device}, got {slopes.device}: move one of them")
            if slopes.shape[-1] != heads or (slopes.dim() == 2 and slopes.shape[0] != batch):
                raise ValueError(
                    f"{name} must be [{heads}] or [{batch}, {heads}] for this q, got {list(slopes.shape)}"
                )
        if causal and not self.is_causal_only:
            raise ValueError(
                "a LinearBias with future, offset or sees describes attention to both sides: pass causal=False"
            )

    def both_ways(self) -> LinearBias:
        return replace(self, sees=None)

    def not_negative(self) -> dict[str, Tensor]:
        return {"slopes": self.slopes} | ({} if self.future is None else {"future": self.future})

    def part(self, rows: slice, heads: slice, keys: slice = slice(None)) -> LinearBias:
        def part_of(slopes: Tensor) -> Tensor:
            return slopes[heads] if slopes.dim() == 1 else slopes[rows, heads]

        return LinearBias(
            part_of(self.slopes),
            future=None if self.future is None else part_of(self.future),
            offset=self.offset,
            sees=None if self.sees is None else self.sees[heads],
        )

    def both_slopes(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The slopes of past and future, each [B or 1, H]."""
        past = torch.atleast_2d(self.slopes).to(dtype)
        return past, past if self.future is None else torch.atleast_2d(self.future).to(dtype)

    def at_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        past, future = (slopes[(..., *[None] * (distance.dim() - 2))] for slopes in self.both_slopes(dtype))
        steps = distance.to(dtype)
        return torch.where(steps > 0, future * (self.offset - steps), past * steps)

    def query_shift(self, away: Tensor, ahead: bool) -> Tensor:
        slopes = self.both_slopes(away.dtype)[1 if ahead else 0].detach()
        return -slopes[..., None] * away

    def gradient_sums(self, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
        zeros = torch.zeros((batch, heads), dtype=dtype, device=self.slopes.device)
        return {"past": zeros, "future": zeros.clone()}

    def add_gradients(
        self, sums: dict[str, Tensor], rows: slice, heads: slice, by_distance: Tensor, distance: Tensor
    ) -> None:
        ahead = torch.where(distance > 0, self.offset - distance.to(by_distance.dtype), 0.0)
        sums["past"][rows, heads] += (by_distance * distance.clamp_max(0)).sum(-1)
        sums["future"][rows, heads] += (by_distance * ahead).sum(-1)

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.future is None:  # one slope for both sides
            return {"slopes": fold_rows(sums["past"] + sums["future"], self.slopes)}
        return {"slopes": fold_rows(sums["past"], self.slopes), "future": fold_rows(sums["future"], self.future)}

    def for_kernels(self, batch: int) -> KernelBias:
        slopes = aligned(self.slopes)
        futures = slopes if self.future is None else aligned(self.future)
        if futures.dim() != slopes.dim():
            shape = (batch, slopes.shape[-1])
            slopes, futures = slopes.expand(shape).contiguous(), futures.expand(shape).contiguous()
        return KernelBias(LINEAR, slopes, futures, by_row=slopes.dim() == 2, offset=float(self.offset))


@dataclass(frozen=True, eq=False)
class BucketBias(Bias):
    """T5's bias: one learned number for each head and each bucket of distances.

    Short distances have a bucket each, longer ones share buckets that grow logarithmically up to `max_distance`;
    everything beyond falls into the last.

    Args:
        table: [num_buckets, H]. Differentiable if it requires grad.
        max_distance: From here on all distances share the last bucket.
        bidirectional: Half of the buckets serve the future (encoders); otherwise the future counts as distance zero.

    Example:
        >>> out = ts.attention(q, k, v, bias=ts.BucketBias(torch.zeros(32, 8)))
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = False

    learned = ("table",)

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

    @property
    def separable_beyond(self) -> int:
        return self.max_distance

    def check_shapes(self, q: Tensor, k: Tensor, causal: bool) -> None:
        if self.table.device != q.device:
            raise ValueError(f"the table must be on q's device {q.device}, got {self.table.device}")
        if self.table.shape[1] != q.shape[1]:
            raise ValueError(
                f"the table must be [num_buckets, {q.shape[1]}] for this q, got {list(self.table.shape)}"
            )

    def part(self, rows: slice, heads: slice, keys: slice = slice(None)) -> BucketBias:
        return replace(self, table=self.table[:, heads])

    def at_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype)[self.bucket(distance)[:, 0]].movedim(-1, 1)

    def gradient_sums(self, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"table": torch.zeros((batch, heads, self.table.shape[0]), dtype=dtype, device=self.table.device)}

    def add_gradients(
        self, sums: dict[str, Tensor], rows: slice, heads: slice, by_distance: Tensor, distance: Tensor
    ) -> None:
        sums["table"][rows, heads].index_add_(2, self.bucket(distance), by_distance)

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"table": sums["table"].sum(0).T[: self.table.shape[0]].to(self.table.dtype).contiguous()}

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


def learned_tensors(bias: Bias | None) -> list[Tensor]:
    """The tensors of a bias that are differentiable if they require grad."""
    return [] if bias is None else [t for name in bias.learned if (t := getattr(bias, name)) is not None]


def _look_both_ways(heads: int) -> tuple[Sight, ...]:
    both: Sight = "both"
    return (both,) * heads


def fold_rows(gradient: Tensor, slopes: Tensor) -> Tensor:
    """A gradient [B, H] in the shape and dtype of the slopes it belongs to."""
    return (gradient if slopes.dim() == 2 else gradient.sum(0)).to(slopes.dtype)


def aligned(numbers: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a dtype, contiguous, at an address that is a multiple of 16."""
    numbers = numbers.detach().to(dtype).contiguous()
    return numbers if numbers.data_ptr() % 16 == 0 else numbers.clone()
