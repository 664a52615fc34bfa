"""DecayBias: a bias c_i - c_j from a sequence c that never rises, given by gates or by times.

Of c only differences count. It is held in float64, where a difference of near tokens, rounded once to float32, is
exact as long as c has fallen by less than 2^29 in all. A rounded running sum may step upwards; here it is cut down to
its running minimum, so that c never rises in the numbers themselves. Gates of zero stay out of the sum: each is a
border that nothing crosses, and positions know the first key behind the last border.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.ops.bias import DECAY, Bias, KernelBias, aligned, fold_rows
from trainshort.ops.gate_sums import running_sums, running_sums_ahead, wide_dtype

LARGEST_BIAS = 2.0**127  # which float32 holds in units of log2 too


@dataclass(frozen=True, eq=False, init=False)
class DecayBias(Bias):
    """A penalty that grows from token to token by as much as each token says: FoX, CABLE, events at real times.

    With a gate for each token and head, the bias of key j for query i >= j is the sum of the log gates of the tokens
    after j up to i: the gate of a token acts on every link that crosses from before it to it or later, and that of
    the first token on none. A gate of zero is a border: nothing attends across it, and its gradient is 0. A log gate
    below -2^20 counts as a gate of zero.

    Args:
        log_gates: [B, H, T] or [1, H, T] for query heads and as many tokens as there are keys; at most 0. Any
            floating point dtype. Differentiable if it requires grad, like `future`.
        future: The log gates for attention to later tokens, like `log_gates`: key j > i costs the sum of those of the
            tokens after i up to j. For causal=False, where it is needed.

    `DecayBias.at` makes one from times. All gates are looked at, those of padding too: let them be 0.

    Example:
        >>> log_gates = torch.nn.functional.logsigmoid(torch.randn(1, 8, 256))  # [B, H, T]
        >>> out = ts.attention(q, k, v, bias=ts.DecayBias(log_gates))
    """

    # No arguments of __init__, and told so: torch 2.11 compiles a call of a frozen dataclass by what its fields say.
    gate_sums: Tensor | None = field(default=None, init=False)  # c, float64 [B or 1, H, T]: NaN from a refused one on
    gate_first: Tensor | None = field(default=None, init=False)  # int32 [B or 1, H, T]: the first that each may see
    ahead_sums: Tensor | None = field(default=None, init=False)  # the same for later keys
    ahead_end: Tensor | None = field(default=None, init=False)  # int32 [B or 1, H, T]: one past the last one
    times: Tensor | None = field(default=None, init=False)  # float64 [B or 1, T]: since the first, NaN like gate_sums
    rates: Tensor | None = field(default=None, init=False)  # [H] or [B, H]: with these, c = -rate * time

    learned = ("gate_sums", "ahead_sums", "rates")
    by_distance = False
    # What it was made of: log gates of both sides, or times. A part of a sequence alone does not use all of it: its
    # first gate acts on links from what stands before it.
    given: ClassVar[tuple[Tensor | None, ...]] = ()

    def __init__(self, log_gates: Tensor, future: Tensor | None = None) -> None:
        sums, first = running_sums(log_gates)
        self._set(gate_sums=sums, gate_first=first)
        if future is not None:
            sums, end = running_sums_ahead(future)
            self._set(ahead_sums=sums, ahead_end=end)
        self._set(given=(log_gates, future))

    @classmethod
    def at(cls, times: Tensor, slopes: Tensor) -> DecayBias:
        """Tokens that stand at times: the bias is `-slope * |time_i - time_j|`, also for causal=False.

        Args:
            times: [T] or [B, T], sorted, as many as there are keys; equal ones are fine. Of integers and float64 no
                digit is lost to float32: they are counted from the first of the row, in float64, and the bias of
                near tokens is off by at most 2^-51 of `slope * (last - first)`. With `cu_seqlens` they may begin anew
                in each document; under `context_parallel` they may not: add to each so much that times go on.
            slopes: [H] or [B, H], at least 0; a head of slope 0 sees everything alike. Differentiable if it requires
                grad.

        Returns:
            The bias.

        Example:
            >>> seconds = torch.rand(256, dtype=torch.float64).cumsum(0)
            >>> out = ts.attention(q, k, v, bias=ts.DecayBias.at(seconds, ts.alibi_slopes(8)))
        """
        if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
            came = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
            raise TypeError(f"DecayBias slopes must be a floating point tensor, got {came}")
        if slopes.dim() not in (1, 2):
            raise ValueError(f"DecayBias slopes must be [heads] or [batch, heads], got shape {list(slopes.shape)}")
        return cls.from_fields(times=_relative(times, slopes), rates=slopes, given=(times,))

    def in_documents(self, cu_seqlens: Tensor) -> DecayBias:
        """The same for packed documents with these borders, in each of which times may begin anew."""
        if self.rates is None or not self.given or self.given[0] is None:
            return self
        return DecayBias.from_fields(times=_relative(self.given[0], self.rates, cu_seqlens), rates=self.rates)

    @classmethod
    def from_sums(cls, sums: Tensor, first: Tensor) -> DecayBias:
        """From what a cache keeps of the gates of all tokens so far, so that none is summed twice.

        Args:
            sums: Running sums of log gates as `running_sums` makes them, float64 [B, H, T].
            first: For each token the first position that it may see, int32 [B, H, T].
        """
        return cls.from_fields(gate_sums=sums, gate_first=first)

    @classmethod
    def from_fields(cls, **values: Any) -> Self:
        bias = object.__new__(cls)
        bias._set(**values)
        return bias

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def certifiable(self) -> bool:
        return True

    @property
    def differs_by_row(self) -> bool:
        return any(tensor.shape[0] > 1 for name, tensor in self._tensors.items() if name != "rates") or (
            self.rates is not None and self.rates.dim() == 2
        )

    def check_shapes(self, q: Tensor, k: Tensor, causal: bool) -> None:
        (batch, heads), keys = q.shape[:2], k.shape[2]
        for name, tensor in self._tensors.items():
            if tensor.device != q.device:
                raise ValueError(
                    f"the DecayBias must be on q's device {q.device}, got {tensor.device}: move what it is made of"
                )
            good = True
            if name == "times":
                good = tensor.shape[0] in (1, batch) and tensor.shape[1] == keys
            elif name == "rates":
                good = tensor.shape[-1] == heads and (tensor.dim() == 1 or tensor.shape[0] == batch)
            elif name in ("gate_sums", "ahead_sums"):
                good = tensor.shape[0] in (1, batch) and tensor.shape[1] == heads and tensor.shape[2] == keys
            if not good:  # words only here: in them a compiler would fix sizes that may change
                wanted = {
                    "times": f"times must be [{keys}] or [{batch}, {keys}]",
                    "rates": f"slopes must be [{heads}] or [{batch}, {heads}]",
                }.get(name, f"{_GIVEN.get(name)} must be [{batch}, {heads}, {keys}] (or 1 for the batch)")
                raise ValueError(
                    f"DecayBias {wanted} for this q and k, one for each query head and key: got {list(tensor.shape)}"
                )
        if causal and self.ahead_sums is not None:
            raise ValueError("a DecayBias with future describes attention to both sides: pass causal=False")
        if not causal and self.rates is None and self.ahead_sums is None:
            raise ValueError(
                "a DecayBias of log gates describes causal attention: for causal=False pass the gates of the other "
                "side as future= (the same ones for a symmetric bias)"
            )

    def not_negative(self) -> dict[str, Tensor]:
        return {} if self.rates is None else {"slopes": self.rates}

    def without_nan(self) -> dict[str, tuple[Tensor, str]]:
        gate = "the one at position {} is above 0 or NaN"
        time = "the one at position {} goes back, is not finite or lies too far from the first"
        named = {
            "DecayBias log_gates must be at most 0 and not NaN": (self.gate_sums, gate),
            "DecayBias future must be at most 0 and not NaN": (self.ahead_sums, gate),
            "DecayBias times must be finite and never go back (in padding repeat the last time), and slope * (time - "
            "first time) must be at most 2^127": (self.times, time),
        }
        return {what: (marked, wrong) for what, (marked, wrong) in named.items() if marked is not None}

    def part(self, rows: slice, heads: slice, keys: slice = slice(None)) -> DecayBias:
        def part_of(name: str, tensor: Tensor) -> Tensor:
            if name == "rates":
                return tensor[heads] if tensor.dim() == 1 else tensor[rows, heads]
            if tensor.shape[0] > 1:
                tensor = tensor[rows]
            if name == "times":
                return tensor[:, keys]
            tensor = tensor[:, heads, keys]
            borders = name in ("gate_first", "ahead_end") and keys.start
            return (tensor - keys.start).clamp(0, tensor.shape[2]) if borders else tensor

        return DecayBias.from_fields(**{name: part_of(name, tensor) for name, tensor in self._tensors.items()})

    def _rates(self) -> Tensor:
        """Slopes in the dtype of times, [B or 1, H], those of 0 as one that is too small for any score to feel: so
        the gradient of each is the sum of the scores' gradients times their bias, over the slope."""
        assert self.rates is not None
        assert self.times is not None
        rates = torch.atleast_2d(self.rates.detach()).to(self.times.dtype)
        if self.times.shape[1] == 0:
            return rates
        span = self.times[:, -1:] - self.times[:, :1]
        return torch.maximum(rates, torch.where(span > 0, 2.0**-80 / span, 0.0))

    def levels(self, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """c for earlier and for later keys, of all or some of them: [B or 1, H, T], in float64, without gradient."""
        if self.times is not None and self.rates is not None:
            past = -self._rates()[..., None] * self.times[:, None, keys]
            return past, past
        assert self.gate_sums is not None
        past = self.gate_sums.detach()[..., keys]
        return past, past if self.ahead_sums is None else self.ahead_sums.detach()[..., keys]

    def heights(self, place: Tensor, ahead: bool) -> tuple[Tensor, Tensor]:
        """Numbers that rise towards the queries, as windows.py has them: of queries at these places [B or 1, Tq], and
        of all keys. ahead: of later keys, from the last to the first. Each [B or 1, H, ...]."""
        levels = self.levels()[ahead]
        queries = pick(levels, place[:, None])
        return (queries, levels.flip(-1)) if ahead else (-queries, -levels)

    def first_visible(self, place: Tensor) -> Tensor | None:
        """The first key that borders leave to queries at these places [B or 1, Tq]: int64 [B or 1, H, Tq]."""
        return None if self.gate_first is None else pick(self.gate_first, place[:, None]).long()

    def end_visible(self, place: Tensor) -> Tensor | None:
        """One past the last key that borders leave to them."""
        return None if self.ahead_end is None else pick(self.ahead_end, place[:, None]).long()

    def between(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        if self.times is not None and self.rates is not None:
            gap = pick(self.times[:, None], query) - pick(self.times[:, None], key)
            rates = torch.atleast_2d(self.rates).to(gap.dtype)
            return (-rates[(..., *[None] * (gap.dim() - 2))] * gap.abs()).to(dtype)
        assert self.gate_sums is not None
        bias = pick(self.gate_sums, query) - pick(self.gate_sums, key)
        if self.ahead_sums is not None:
            bias = torch.where(key > query, pick(self.ahead_sums, key) - pick(self.ahead_sums, query), bias)
        return bias.to(dtype)

    def hides(self, query: Tensor, key: Tensor) -> Tensor | None:
        hidden = None if self.gate_first is None else key < pick(self.gate_first, query)
        if hidden is not None and self.ahead_end is not None:
            hidden = hidden | (key >= pick(self.ahead_end, query))
        return hidden

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of "rates" are those of the scores' gradients times their bias."""
        found = {}
        for name, total in sums.items():
            tensor = self._tensors[name]
            if name == "rates":
                rates = self._rates()
                found[name] = fold_rows((total / rates).masked_fill(rates == 0, 0.0), tensor)
            else:
                found[name] = (total.sum(0, keepdim=True) if tensor.shape[0] == 1 else total).to(tensor.dtype)
        return found

    def for_kernels(self, batch: int) -> KernelBias:
        past, later = self.levels()
        if self.rates is not None:
            levels = aligned(past, past.dtype)
            return KernelBias(DECAY, levels=levels, ahead=levels)
        assert self.gate_first is not None
        if self.ahead_sums is None or self.ahead_end is None:
            levels, first = _laid_out_alike(batch, past, self.gate_first)
            return KernelBias(DECAY, levels=levels, gate_first=first)
        levels, first, ahead, end = _laid_out_alike(batch, past, self.gate_first, later, self.ahead_end)
        return KernelBias(DECAY, levels=levels, gate_first=first, ahead=ahead, ahead_end=end)


def _laid_out_alike(batch: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [B or 1, H, T] with the same strides, at addresses that are multiples of 16. As they are if they have
    them already: a step of decoding must not copy what a cache keeps."""
    if len({tensor.shape[0] for tensor in tensors}) > 1:
        tensors = tuple(tensor.expand(batch, -1, -1) for tensor in tensors)
    if len({tensor.stride() for tensor in tensors}) > 1 or tensors[0].stride(2) != 1:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
    return tuple(tensor if tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors)


_GIVEN = {"gate_sums": "log_gates", "ahead_sums": "future"}


def _relative(times: Tensor, slopes: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Times since the first of a row, float64 [B or 1, T]; NaN from where they go back, are not finite, or lie so far
    away that float32 does not hold their bias. Where there are documents, no time passes between them."""
    if not isinstance(times, Tensor) or times.is_complex() or times.dtype == torch.bool:
        came = times.dtype if isinstance(times, Tensor) else type(times).__name__
        raise TypeError(f"DecayBias times must be a tensor of integers or of floating point numbers, got {came}")
    if times.dim() not in (1, 2):
        raise ValueError(f"DecayBias times must be [length] or [batch, length], got shape {list(times.shape)}")
    if times.requires_grad:
        raise ValueError(
            "DecayBias times have no gradient, only slopes have: pass times.detach(), or log gates, which are "
            "differentiable"
        )
    wide = wide_dtype(times.device)
    # Integers without a sign would turn round where they go back, and short ones where they lie far apart.
    times = torch.atleast_2d(times.detach()).to(wide if times.is_floating_point() else torch.int64)
    if cu_seqlens is None or times.shape[1] == 0:
        since = (times - times[:, :1]).to(wide)
        back = F.pad(since.diff(dim=-1) < 0, (min(1, since.shape[1]), 0))
    else:
        gaps = F.pad(times.diff(dim=-1), (1, 1))  # before each token, and behind the last
        gaps = gaps.index_fill(1, cu_seqlens.long().clamp(0, times.shape[1]), 0)[:, :-1]
        since = gaps.cumsum(-1)
        back = (gaps < 0) | (since < 0)  # which a sum of integers gets to beyond the largest
        since = since.to(wide).cummax(-1).values
    refused = back | ~torch.isfinite(since)
    if slopes.numel() and slopes.device == since.device:  # others are refused by check_shapes
        refused = refused | (since * slopes.detach().amax() > LARGEST_BIAS)
    refused = refused.cumsum(-1) > 0
    return since.masked_fill(refused, float("nan"))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """The values [B or 1, H, T] at an index [B or 1, 1, ...], put inside 0..T-1: [B or 1, H, ...]."""
    batch = index.shape[0] if values.shape[0] == 1 else values.shape[0]
    shape = (batch, values.shape[1], *index.shape[2:])
    if values.shape[2] == 0:
        return values.new_zeros(shape)
    flat = index.clamp(0, values.shape[2] - 1).flatten(1)[:, None].expand(batch, values.shape[1], -1)
    return values.expand(batch, -1, -1).gather(2, flat).reshape(shape)
