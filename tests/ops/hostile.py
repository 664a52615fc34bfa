"""Hostile inputs, in one place: numbers that break bounds, windows and kernels which only ever met normal ones.

Every constructor takes the length (and the dtype) and returns the arguments of a `Case`: q, k, v, slopes and
whatever else makes it hostile. `FINITE` are the names whose float32 dense attention is finite; `NON_FINITE` put
one inf or NaN into q or k, and say in `poisoned` at which (batch, head, position).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BATCH, HEADS, DIM = 2, 4, 16
STEEP_AND_GENTLE = (0.9999, 0.25, 0.01, 1e-4)


def _normal(length: int, dtype: torch.dtype, slopes: tuple[float, ...] = STEEP_AND_GENTLE, seed: int = 3) -> dict:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn((BATCH, HEADS, length, DIM), generator=generator).to(dtype) for _ in range(3))
    return {"q": q, "k": k, "v": v, "slopes": torch.tensor(slopes)}


def _direction(dtype: torch.dtype) -> Tensor:
    vector = torch.randn(DIM, generator=torch.Generator().manual_seed(7))
    return (vector / vector.norm()).to(dtype)


def normal(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """Nothing hostile but the slopes, 1e-4 to 0.9999."""
    return _normal(length, dtype)


def outlier_key(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """One key far away is so long that half of all queries want nothing else."""
    case = _normal(length, dtype)
    case["k"][:, :, length // 8] = 1000.0 * _direction(dtype)
    return case


def outlier_query(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """One query of a block is so long that any far key may win."""
    case = _normal(length, dtype)
    case["q"][:, :, -5] *= 300.0
    return case


def zero_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    case = _normal(length, dtype)
    return case | {"k": torch.zeros_like(case["k"])}


def zero_queries(length: int, dtype: torch.dtype = torch.float32) -> dict:
    case = _normal(length, dtype)
    return case | {"q": torch.zeros_like(case["q"])}


def constant_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """All keys equal: the scores differ by the bias alone, however long the keys are."""
    case = _normal(length, dtype)
    return case | {"k": (50.0 * _direction(dtype)).expand_as(case["k"]).clone()}


def aligned_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """Keys of norm 1e4 along one direction and queries along it, so that rounding has the size of the slopes."""
    case = _normal(length, dtype)
    generator = torch.Generator().manual_seed(5)
    wiggle = 1.0 + 1e-4 * torch.rand(case["k"].shape[:3], generator=generator)[..., None].to(dtype)
    return case | {
        "k": 1e4 * _direction(dtype) * wiggle,
        "q": _direction(dtype) * (1.0 + case["q"].norm(dim=-1, keepdim=True) / 10),
    }


def opposed_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """The nearest keys repel as strongly as they can, older ones attract: own scores are the worst guide."""
    case = _normal(length, dtype, slopes=(0.9999, 0.5, 0.25, 0.1))
    sign = torch.where(torch.arange(length) % 97 == 0, 1.0, -1.0).to(dtype)[:, None]
    return case | {
        "k": (20.0 * sign * _direction(dtype)).expand_as(case["k"]).clone(),
        "q": (4.0 * _direction(dtype)).expand_as(case["q"]).clone(),
    }


def tiny_norms(length: int, dtype: torch.dtype = torch.float32) -> dict:
    case = _normal(length, dtype)
    return case | {"q": 1e-4 * case["q"], "k": 1e-4 * case["k"]}


def far_key(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """The last query needs the first key but three, in every head: slopes are as steep as its score can pay for."""
    case = _normal(length, dtype, slopes=tuple(s / length for s in (40.0, 30.0, 20.0, 10.0)))
    case["k"][:, :, 3] = 40.0 * _direction(dtype)
    case["q"][:, :, -1] = 8.0 * _direction(dtype)
    return case


def slopes_by_row(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """[B, H] slopes: a steep row beside a gentle one."""
    return _normal(length, dtype) | {"slopes": torch.tensor([[0.9999, 0.5, 1e-4, 0.01], [1e-4, 0.02, 0.7, 0.3]])}


def shifted_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """A large common part, as keys of trained models have it: it changes no softmax, but every norm."""
    case = _normal(length, dtype)
    return case | {"k": case["k"] + 30.0 * _direction(dtype)}


def growing_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """The older a key, the longer: from 1 to 30 times."""
    case = _normal(length, dtype, slopes=(0.9999, 0.25, 0.1, 0.03))
    return case | {"k": case["k"] * torch.linspace(30.0, 1.0, length).to(dtype)[:, None]}


def shrinking_keys(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """The mirror image, hostile to the future side: the later a key, the longer."""
    case = _normal(length, dtype, slopes=(0.9999, 0.25, 0.1, 0.03))
    return case | {"k": case["k"] * torch.linspace(1.0, 30.0, length).to(dtype)[:, None]}


def ramp_against_the_slope(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """Scores that undo the penalty exactly: q.k falls by the slope at every step, so that every key counts alike."""
    case = _normal(length, dtype, slopes=(0.5, 0.25, 0.125, 0.0625))
    age = torch.arange(length, 0, -1).to(dtype)[:, None]
    k = age * case["slopes"].to(dtype)[:, None, None] * _direction(dtype)
    return case | {
        "k": k.expand_as(case["k"]).clone(),
        "q": _direction(dtype).expand_as(case["q"]).clone(),
        "scale": 1.0,
    }


def huge_range(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """Norms whose squares overflow float32, with scores that do not."""
    case = _normal(length, dtype)
    return case | {"q": 1e-18 * case["q"], "k": 1e20 * case["k"], "scale": 0.01}


def tiny_range(length: int, dtype: torch.dtype = torch.float32) -> dict:
    """Keys whose squares are below float32, made up for by the scale."""
    case = _normal(length, dtype)
    return case | {"q": 1e12 * case["q"], "k": 1e-23 * case["k"], "scale": 1e13}


def negative_scale(length: int, dtype: torch.dtype = torch.float32) -> dict:
    return _normal(length, dtype) | {"scale": -0.5}


FINITE: dict[str, Callable[..., dict]] = {
    maker.__name__: maker
    for maker in (
        normal,
        outlier_key,
        outlier_query,
        zero_keys,
        zero_queries,
        constant_keys,
        aligned_keys,
        opposed_keys,
        tiny_norms,
        far_key,
        slopes_by_row,
        shifted_keys,
        growing_keys,
        shrinking_keys,
        ramp_against_the_slope,
        huge_range,
        tiny_range,
        negative_scale,
    )
}


def _poison(tensor: str, value: float, row: int, head: int, share: float) -> Callable[..., dict]:
    def make(length: int, dtype: torch.dtype = torch.float32) -> dict:
        case = _normal(length, dtype)
        position = int(share * length)
        case[tensor][row, head, position, 2] = value
        return case | {"poisoned": (tensor, row, head, position)}

    return make


NON_FINITE: dict[str, Callable[..., dict]] = {
    "nan_in_q": _poison("q", math.nan, row=1, head=0, share=0.7),
    "inf_in_q": _poison("q", math.inf, row=0, head=1, share=0.6),
    "nan_in_k": _poison("k", math.nan, row=1, head=0, share=0.2),
    "inf_in_k": _poison("k", math.inf, row=0, head=0, share=0.3),
    "minus_inf_in_k": _poison("k", -math.inf, row=1, head=2, share=0.1),
    "nan_in_first_key": _poison("k", math.nan, row=0, head=3, share=0.0),
    "nan_in_last_key": _poison("k", math.nan, row=0, head=0, share=0.999),
}


def far_key_10_000_back(dtype: torch.dtype = torch.float32) -> dict:
    """The last query needs a key 10,000 back, in a head with a slope of 1/256; all others look near."""
    generator = torch.Generator().manual_seed(11)
    length = 10_200
    q, k, v = (torch.randn((1, 1, length, DIM), generator=generator).to(dtype) for _ in range(3))
    k[:, :, length - 1 - 10_000] = 60.0 * _direction(dtype)
    q[:, :, -1] = 6.0 * _direction(dtype)
    return {"q": q, "k": k, "v": v, "slopes": torch.tensor([2.0**-8])}
