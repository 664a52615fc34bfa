"""One attention problem: its tensors, its description, and what their shapes and dtypes must be.

`check_shapes` looks at shapes and dtypes only. What only contents can tell is in values.py.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from trainshort.ops.bias import Bias, LinearBias, Sight
from trainshort.ops.biases import BIASES, NAMES
from trainshort.ops.decay import DecayBias
from trainshort.ops.dropout import seed_tensor, threshold_of

BLOCK = 128  # rows and keys of a block: the granularity at which keys are skipped

POSITIONS = 2**62  # beyond every length, and safe to add one to

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEFAULT_TOLERANCE = {
    torch.float16: 2.0**-14,
    torch.bfloat16: 2.0**-14,
    torch.float32: 2.0**-24,
    torch.float64: 0.0,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Everything that defines one call. Queries are [B, H, Tq, D]; keys and values [B, Hkv, Tk, D].

    The fields are listed here and nowhere else: operators.py makes the arguments of the registered operators of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    causal: bool
    scale: float
    tolerance: float
    key_padding_mask: Tensor | None = None  # [B, Tk], True where a key is real
    cu_seqlens: Tensor | None = None  # [documents + 1]
    query_start: int | Tensor | None = None  # position of query 0 among the keys
    key_norms: Tensor | None = None  # upper bounds of ‖k‖: [B, Hkv], a block of keys or a key each
    dropout: float = 0.0  # the probability that a weight is dropped
    seed: Tensor | None = None  # of the dropout: int64 [], [B, H, 3] or [B, H, Tq, 3] (dropout.py)
    wants_windows: bool = False  # whether it is to be told which keys were visited

    @property
    def start(self) -> int | Tensor:
        """The position of query 0 in the coordinates of the keys: an int, or int64 [B]."""
        if self.query_start is None:
            return self.k.shape[2] - self.q.shape[2]
        return self.query_start

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Which way each head looks."""
        heads = self.q.shape[1]
        if not self.causal and self.bias is not None:
            return self.bias.sights(heads)
        sight: Sight = "past" if self.causal else "both"
        return (sight,) * heads

    @property
    def may_skip(self) -> bool:
        """Whether bias and tolerance allow for skipping keys."""
        return self.bias is not None and self.bias.certifiable and self.tolerance > 0.0

    @property
    def bias_is_linear(self) -> bool:
        return isinstance(self.bias, LinearBias)

    @property
    def linear(self) -> LinearBias:
        """The bias where it is linear; the next, where it is a decay."""
        assert isinstance(self.bias, LinearBias)
        return self.bias

    @property
    def decay(self) -> DecayBias:
        assert isinstance(self.bias, DecayBias)
        return self.bias

    @property
    def is_decoding(self) -> bool:
        """At most 16 causal queries a row, 64 with those of a group: there are paths of their own for these."""
        queries, group = self.q.shape[2], self.q.shape[1] // self.k.shape[1]
        few = holds(queries <= 16) and holds(queries * group <= 64)
        return self.causal and self.cu_seqlens is None and few

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def to(self, device: str) -> Problem:
        """The same problem with every tensor on another device."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, (Tensor, Bias)) else value

        return Problem(**{field.name: move(getattr(self, field.name)) for field in fields(self)})

    def part(self, rows: slice, heads: slice) -> Problem:
        """The same problem for some rows of the batch and some heads: whole groups of those that share a key head."""
        group = self.q.shape[1] // self.k.shape[1]
        keys = slice(heads.start // group, heads.stop // group)

        def rows_of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        start, norms, seed = self.query_start, self.key_norms, self.seed
        return replace(
            self,
            q=self.q[rows, heads],
            k=self.k[rows, keys],
            v=self.v[rows, keys],
            bias=None if self.bias is None else self.bias.part(rows, heads),
            key_padding_mask=rows_of(self.key_padding_mask),
            query_start=start[rows] if isinstance(start, Tensor) else start,
            key_norms=None if norms is None else norms[rows, keys],
            seed=seed if seed is None or seed.dim() == 0 else seed[rows, heads],
        )

    @property
    def bias_differs_by_row(self) -> bool:
        """Whether rows of the batch have a bias of their own."""
        return self.bias is not None and self.bias.differs_by_row

    @property
    def separable_beyond(self) -> int:
        """How far from a query the bias still depends on the distance in a way of its own: T5's largest distance."""
        return 0 if self.bias is None else self.bias.separable_beyond

    def true_positions(self) -> Tensor:
        """Where each query stands, in padding or beyond all keys: int64 [B or 1, Tq]."""
        index = torch.arange(self.q.shape[2], device=self.q.device)
        start = self.start
        if isinstance(start, Tensor):
            return start.to(torch.int64)[:, None] + index
        return (min(max(start, -POSITIONS), POSITIONS) + index)[None]

    def positions(self) -> Tensor:
        """The position of each query among the keys, int64 [B or 1, Tq].

        A query beyond all keys of its own sequence is put next to the nearest of them (beyond the reach of the bias).
        It sees the same keys with the same weights there, because what all its distances have in common changes no
        softmax; and distances stay so small that float32 holds them exactly.
        """
        position = self.true_positions()
        if self.cu_seqlens is not None:
            return position
        first, end = self.key_runs()
        return torch.minimum(torch.maximum(position, first - 1 - self.separable_beyond), end + self.separable_beyond)

    def bias_positions(self) -> Tensor:
        """The position of each query as its bias sees it, int64 [B or 1, Tq].

        Where the bias is more than a function of distance, a query beyond all keys of its own sequence takes the
        place of the nearest of them. That changes no weight either.
        """
        position = self.positions()
        if self.bias is None or self.bias.by_distance:
            return position
        first, end = self.key_runs()
        return torch.maximum(torch.minimum(position, end - 1), first)

    def key_runs(self) -> tuple[Tensor, Tensor]:
        """For each query the run of keys of its own sequence: [first, end), int64 [B or 1, Tq]."""
        device, queries, keys = self.q.device, self.q.shape[2], self.k.shape[2]
        if self.cu_seqlens is not None:
            borders = self.cu_seqlens.to(torch.int64)
            index = torch.arange(queries, device=device)
            document = torch.searchsorted(borders, index, right=True)
            return borders[document - 1][None], borders[document][None]
        if self.key_padding_mask is not None:
            real = self.key_padding_mask
            count = real.sum(-1)
            first = real.to(torch.int8).argmax(-1) if keys else torch.zeros_like(count)
            return first[:, None].expand(-1, queries), (first + count)[:, None].expand(-1, queries)
        zero = torch.zeros((1, queries), dtype=torch.int64, device=device)
        return zero, zero + keys


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; where a program for all lengths is exported, for every one of them."""
    if not torch.compiler.is_exporting():
        return True if condition else False  # noqa: SIM210  bool() of a symbol stays one in a compiler
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def gradient_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, of the tensor's shape, in the memory layout of gradients: the heads of a token together."""
    _, heads, length, dim = tensor.shape
    strides = (length * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided(tensor.shape, strides, dtype=dtype or tensor.dtype, device=tensor.device)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    *,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    key_norms: Tensor | None = None,
    **others: Any,
) -> Problem:
    """Check what can be checked without looking at values, and fill in what was left out."""
    given = k
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v)
    if k is not given and isinstance(key_norms, Tensor):
        key_norms = _norms_after_rounding(key_norms, k)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        bias=bias,
        causal=bool(causal),
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        tolerance=DEFAULT_TOLERANCE[q.dtype] if tolerance is None else tolerance,
        key_norms=key_norms,
        **_dropout(q, others.pop("dropout", 0.0), others.pop("seed", None)),
        **others,
    )
    check_shapes(problem)
    if problem.cu_seqlens is not None and isinstance(bias, DecayBias):
        return replace(problem, bias=bias.in_documents(problem.cu_seqlens))
    return problem


def _dropout(q: Tensor, dropout: float, seed: int | Tensor | None) -> dict[str, Any]:
    """The fields of a problem that say which weights are dropped."""
    if type(dropout) is float and dropout == 0.0:
        return {}
    _check_number("dropout", dropout)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1): the probability that a weight is dropped; got {dropout}")
    return {"dropout": dropout, "seed": seed_tensor(seed, q)} if threshold_of(dropout) else {}


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast queries, keys and values take its dtype; everything else stays as it is."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in (q, k, v)) or q.dtype == torch.float64:
        return q, k, v
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _norms_after_rounding(norms: Tensor, k: Tensor) -> Tensor:
    """Upper bounds for keys that were just rounded to k's dtype, from those of the keys as they were.

    A normal number grows by half a unit in the last place at most, a smaller one by less than the smallest there is;
    one beyond the largest becomes infinite.
    """
    limits = torch.finfo(k.dtype)
    longer = norms * (1.0 + 0.51 * limits.eps) + k.shape[3] ** 0.5 * limits.smallest_normal * limits.eps
    return torch.where(longer > limits.max, math.inf, longer)


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Shapes, dtypes and devices of queries, keys and values."""
    named = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {_shape(tensor)}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    for name, tensor in named.items():
        _check_like_q(name, tensor, q)
    if q.shape[3] < 1 or q.shape[1] < 1:
        raise ValueError(f"q needs at least one head and one head_dim, got shape {_shape(q)}")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v must have k's shape {_shape(k)}, got {_shape(v)}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key heads, "
            f"got q with {q.shape[1]} heads and k with {k.shape[1]}"
        )


def _check_like_q(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}: convert one of them")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}: move one of them")
    if tensor.shape[0] != q.shape[0]:
        raise ValueError(f"{name} must have q's batch size {q.shape[0]}, got {tensor.shape[0]}")
    if tensor.shape[3] != q.shape[3]:
        raise ValueError(f"{name} must have q's head_dim {q.shape[3]}, got {tensor.shape[3]}")


def check_shapes(problem: Problem) -> None:
    """Everything that shapes, dtypes and plain numbers can tell. Never looks inside a tensor."""
    q, k = problem.q, problem.k
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    if problem.bias is not None:
        if not isinstance(problem.bias, BIASES):
            raise TypeError(f"bias must be {NAMES} or None, got {type(problem.bias).__name__}")
        problem.bias.check_shapes(q, k, problem.causal)
    _check_number("scale", problem.scale)
    _check_number("tolerance", problem.tolerance)
    if not 0.0 <= problem.tolerance < 1.0:
        raise ValueError(f"tolerance must lie in [0, 1): the softmax mass a query may skip; got {problem.tolerance}")
    _check_padding_shape(problem, batch, keys)
    _check_packing_shape(problem, batch, queries, keys)
    start = problem.query_start
    if isinstance(start, Tensor):
        if start.dtype not in (torch.int32, torch.int64) or start.dim() != 1 or start.shape[0] != batch:
            raise ValueError(
                f"query_start must be an int or an int32 or int64 tensor [{batch}], got {start.dtype} {_shape(start)}"
            )
        if start.device != q.device:
            raise ValueError(f"query_start must be on q's device {q.device}, got {start.device}")
    elif start is not None and (isinstance(start, bool) or not isinstance(start, (int, torch.SymInt))):
        raise TypeError(f"query_start must be an int or an int tensor [batch], got {type(start).__name__}")
    elif isinstance(start, int) and not -POSITIONS <= start <= POSITIONS:
        raise ValueError(f"query_start must lie between -2^62 and 2^62, got {start}")
    if problem.key_norms is not None:
        _check_key_norms_shape(problem.key_norms, k)


def _check_number(name: str, value: float) -> None:
    usual = type(value) is float or type(value) is int  # asked first, because numbers.Real takes long to ask
    if not usual and (isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat))):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if value - value != 0:  # NaN or infinite, in words that a compiler follows for symbols too
        raise ValueError(f"{name} must be finite, got {value}")


def _check_padding_shape(problem: Problem, batch: int, keys: int) -> None:
    mask = problem.key_padding_mask
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor, True where a key is real (mask.bool()); got {came}")
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] != keys:
        raise ValueError(f"key_padding_mask must be [{batch}, {keys}] for this k, got {_shape(mask)}")
    if mask.device != problem.q.device:
        raise ValueError(f"key_padding_mask must be on q's device {problem.q.device}, got {mask.device}")


def _check_packing_shape(problem: Problem, batch: int, queries: int, keys: int) -> None:
    borders = problem.cu_seqlens
    if borders is None:
        return
    if not isinstance(borders, Tensor) or borders.dtype not in (torch.int32, torch.int64):
        came = borders.dtype if isinstance(borders, Tensor) else type(borders).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {came}")
    if borders.dim() != 1 or borders.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [documents + 1], got {_shape(borders)}")
    if borders.device != problem.q.device:
        raise ValueError(f"cu_seqlens must be on q's device {problem.q.device}, got {borders.device}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: batch must be 1, got {batch}")
    if problem.key_padding_mask is not None:
        raise ValueError("cu_seqlens and key_padding_mask do not combine: leave the padding out of the row")
    if problem.query_start is not None:
        raise ValueError("cu_seqlens and query_start do not combine: documents start at their own position 0")
    if queries != keys:
        raise ValueError(f"cu_seqlens needs as many queries as keys, got {queries} and {keys}")


def _check_key_norms_shape(norms: Tensor, k: Tensor) -> None:
    batch, kv_heads, keys, _ = k.shape
    blocks = -(-keys // BLOCK)
    if not isinstance(norms, Tensor) or not norms.is_floating_point():
        came = norms.dtype if isinstance(norms, Tensor) else type(norms).__name__
        raise TypeError(f"key_norms must be a floating point tensor, got {came}")
    rows = norms.dim() in (2, 3) and norms.shape[0] == batch and norms.shape[1] == kv_heads
    if not rows or (norms.dim() == 3 and norms.shape[2] != blocks and norms.shape[2] != keys):
        raise ValueError(
            f"key_norms must be [batch, key heads], with a last dimension of {blocks} (one bound for each "
            f"block of {BLOCK} keys) or {keys} (one for each key) if any: got {_shape(norms)}"
        )
    if norms.device != k.device:
        raise ValueError(f"key_norms must be on q's device {k.device}, got {norms.device}")
