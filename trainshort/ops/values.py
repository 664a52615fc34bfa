"""What only the contents of the small tensors of a call can tell: slopes, gates, norms, padding, document borders.

They are looked at directly on a CPU, and by device-side assertions elsewhere, so that no check ever waits for a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from trainshort.ops.bias import LARGEST_SLOPE
from trainshort.ops.problem import Problem


def check_values(problem: Problem) -> None:
    """What only the contents can tell: positive slopes, norms, no holes in the padding, borders in order."""
    if problem.bias is not None:
        for name, slopes in problem.bias.positive().items():
            require_positive(name, slopes)
        for name, slopes in problem.bias.not_negative().items():
            require_positive(name, slopes, or_zero=True)
        for what, (marked, wrong) in problem.bias.without_nan().items():
            require_no_nan(what, marked, wrong)
    if problem.key_norms is not None:
        _require_norms(problem.key_norms)
    mask = problem.key_padding_mask
    if mask is not None and mask.shape[1] > 1:
        edges = (mask[:, 1:] != mask[:, :-1]).sum(-1) + mask[:, 0] + mask[:, -1]
        _require(
            edges <= 2,
            "key_padding_mask must be one contiguous run of True a row (left or right padding)",
            lambda: f": row {int((edges > 2).nonzero()[0])} has a hole",
        )
    borders = problem.cu_seqlens
    if borders is not None:
        total = problem.k.shape[2]
        good = (borders[:1] == 0).all() & (borders[-1:] == total).all() & (borders.diff() >= 0).all()
        _require(
            good,
            f"cu_seqlens must start at 0, never go down and end at the length {total}",
            lambda: f", got {borders.tolist()[:8]}{' ...' if len(borders) > 8 else ''}",
        )


# Slopes and norms on a GPU that were found good already: asking takes longer there than computing a short sequence.
_known: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def _is_known(numbers: Tensor) -> bool:
    """Whether these very numbers, unchanged, were looked at before. Remembers them."""
    if numbers.device.type == "cpu" or numbers.is_inference() or torch.compiler.is_compiling():
        return False
    known = _known.get(id(numbers))
    if known is not None and known[0]() is numbers and known[1] == numbers._version:
        return True
    if len(_known) > 256:
        _known.clear()
    _known[id(numbers)] = (weakref.ref(numbers), numbers._version)
    return False


def require_positive(name: str, slopes: Tensor, *, or_zero: bool = False) -> None:
    if _is_known(slopes):
        return
    good = ((slopes >= 0) if or_zero else (slopes > 0)) & (slopes <= LARGEST_SLOPE)  # NaN compares false

    def came() -> str:
        number = float(slopes.detach()[~good][0])
        hint = ": a head of slope 100 sees its own position alone already" if number > LARGEST_SLOPE else ""
        return f", got {number}{hint}"

    _require(good, f"{name} must be {'0 or ' if or_zero else ''}positive and at most 2^64", came)


def require_no_nan(what: str, marked: Tensor, wrong: str) -> None:
    if _is_known(marked):
        return
    bad = torch.isnan(marked[..., -1:])  # NaN goes on to the last number: no step looks at all of them
    _require(~bad, what, lambda: f": {wrong.format(int(marked.isnan().nonzero()[:, -1].amin()))}")


# Norms on a GPU that a cache keeps and writes itself, by address: there is nothing to look for in them at every step.
_kept_norms: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def trust_norms(norms: Tensor) -> None:
    """Say that nothing negative is ever written to these norms."""
    if _has_address(norms):
        _kept_norms[norms.data_ptr()] = norms


def _has_address(norms: Tensor) -> bool:
    return not torch.compiler.is_compiling() and norms.is_cuda and type(norms) is Tensor


def _require_norms(norms: Tensor) -> None:
    if _has_address(norms) and (norms.data_ptr() in _kept_norms or _is_known(norms)):
        return
    good = ~(norms < 0)  # NaN is allowed: then everything is visited
    _require(good, "key_norms must not be negative", lambda: f", got {float(norms.detach()[~good][0])}")


def _require(good: Tensor, what: str, came: Callable[[], str]) -> None:
    if good.device.type == "cpu":
        if not bool(good.all()):
            raise ValueError(f"{what}{came()}")
    elif good.device.type == "cuda":
        torch._assert_async(good.all(), what)
