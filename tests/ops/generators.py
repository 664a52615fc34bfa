"""Random and hostile calls of every kind for counting certificates: `cases(seed)` never ends, on any device.

Contents (hostile.py, and runs of keys that attract and repel) are combined at random with what a caller can ask for:
sides, slopes by row, padding, packing, caches, groups of heads, given norms, number formats, scales and tolerances.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.cases import left_padding, right_padding
from tests.ops.dense import Case

TOLERANCES = (2.0**-24, 2.0**-20, 2.0**-14, 1e-3, 1e-2)
WIDE_RANGE = ("huge_range", "tiny_range", "aligned_keys")  # beyond the 16-bit formats
SIDES = ("causal", "causal", "symmetric", "one_sided", "left_right")
PLACES = (
    "whole",
    "whole",
    "whole",
    "left_padding",
    "right_padding",
    "packed",
    "few",
    "one",
    "inside",
    "by_row",
    "beyond",
)
NORMS = ("none", "none", "keys", "running", "blocks", "one")


def cases(
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
    lengths: tuple[int, int] = (129, 640),
    kinds: str = "slopes",
) -> Iterator[Case]:
    """Calls of attention whose windows can be checked against dense attention in float64.

    kinds: or "decay", or "power".
    """
    number = seed * 1_000_000
    while True:
        yield _on(_case(random.Random(number), dtypes, lengths, kinds), device)
        number += 1


def _case(choose: random.Random, dtypes: tuple[torch.dtype, ...], lengths: tuple[int, int], kinds: str) -> Case:
    dtype = choose.choice(dtypes)
    length = choose.randint(*lengths)
    contents = [name for name in hostile.FINITE if dtype.itemsize > 2 or name not in WIDE_RANGE]
    name = choose.choice([*contents, "runs", "runs", "runs"])
    arguments = _runs(choose, length) if name == "runs" else hostile.FINITE[name](length)
    loud = choose.choice((1e-3, 0.1, 1.0, 1.0, 3.0))
    case = Case(**arguments)
    case = replace(case, q=(loud * case.q).to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))
    case = replace(case, tolerance=choose.choice(TOLERANCES), slopes=_slopes(choose, case))
    if choose.random() < 0.3:
        group = choose.choice((2, 4))
        case = replace(case, k=case.k[:, ::group], v=case.v[:, ::group])
    case = replace(case, **_place(choose, case))
    case = replace(case, **{"slopes": _sides, "decay": _decay, "power": _power}[kinds](choose, case))
    return replace(case, key_norms=_norms(choose.choice(NORMS), case))


def _runs(choose: random.Random, length: int) -> dict[str, Any]:
    """Keys that attract or repel in runs, as long as each other or not, and queries of several lengths."""
    generator = torch.Generator().manual_seed(choose.randrange(2**40))
    shape = (hostile.BATCH, hostile.HEADS, length)
    direction = torch.nn.functional.normalize(torch.randn(hostile.DIM, generator=generator), dim=0)
    turns = torch.rand(shape, generator=generator) < 1.0 / choose.choice((3, 30, 100, 300))
    signs = 1.0 - 2.0 * (turns.long().cumsum(-1) % 2)
    lengths = 1.0 + choose.choice((0.0, 0.0, 0.5)) * torch.rand(shape, generator=generator)
    k = (signs * lengths)[..., None] * direction + choose.choice((0.0, 0.0, 0.1)) * torch.randn(
        (*shape, hostile.DIM), generator=generator
    )
    sizes = choose.choice((1.0, 4.0, 12.0)) * (
        choose.choice((0.0, 0.3)) * torch.randn(shape, generator=generator) + 1.0
    )
    q = sizes[..., None] * hostile.DIM**0.5 * direction
    return {"q": q, "k": k, "v": torch.zeros_like(k), "slopes": torch.ones(hostile.HEADS)}


def _slopes(choose: random.Random, case: Case) -> Tensor:
    """Those of the contents, or from 0.003 to 1 (to 30 at times), by row or not."""
    assert case.slopes is not None
    kind = choose.choice(("own", "random", "random", "by_row", "steep"))
    if kind == "own" and not bool((case.slopes == 1.0).all()):
        return case.slopes
    shape = case.q.shape[:2] if kind == "by_row" else case.q.shape[1:2]
    generator = torch.Generator().manual_seed(choose.randrange(2**40))
    return (30.0 if kind == "steep" else 1.0) * 2.0 ** (-8.0 * torch.rand(shape, generator=generator))


def _sides(choose: random.Random, case: Case) -> dict[str, Any]:
    side = choose.choice(SIDES)
    if side == "causal":
        return {}
    features: dict[str, Any] = {"causal": False, "offset": choose.choice((0.0, 0.0, 0.5, 1.0))}
    if side == "one_sided":
        features["sees"] = [choose.choice(("past", "future", "both")) for _ in range(case.q.shape[1])]
    if side == "left_right":
        features["future"] = _slopes(choose, case)
    return features


def _decay(choose: random.Random, case: Case) -> dict[str, Any]:
    """Gates of many kinds, or times, instead of slopes."""
    causal = choose.random() < 0.6
    keys, heads = case.k.shape[2], case.q.shape[1]
    generator = torch.Generator().manual_seed(choose.randrange(2**40))
    if choose.random() < 0.3:
        gaps = torch.rand(keys, generator=generator, dtype=torch.float64)
        gaps = gaps ** choose.choice((1.0, 4.0)) * (torch.rand(keys, generator=generator) < choose.choice((0.1, 1.0)))
        times = 1.79e9 + gaps.cumsum(0)
        return {"times": times, "causal": causal, "slopes": _slopes(choose, case)}

    def gates() -> Tensor:
        shape = (choose.choice((1, case.q.shape[0])), heads, keys)
        offset = choose.choice((-4.0, 0.0, 2.0, 5.0)) + choose.choice((0.0, 2.0)) * torch.randn(
            (heads, 1), generator=generator
        )
        logits = offset + choose.choice((0.0, 1.0, 6.0)) * torch.randn(shape, generator=generator)
        found = torch.nn.functional.logsigmoid(logits)
        kind = choose.choice(("plain", "plain", "borders", "cliffs", "constant", "bursts"))
        if kind == "borders":
            found[torch.rand(shape, generator=generator) < choose.choice((0.003, 0.03))] = -torch.inf
        if kind == "cliffs":
            found[torch.rand(shape, generator=generator) < 0.01] = choose.choice((-20.0, -1e5))
        if kind == "constant":
            found = -torch.atleast_2d(_slopes(choose, case))[:1, :, None].expand(1, heads, keys)
        if kind == "bursts":
            found = found * ((torch.arange(keys) // choose.choice((7, 100, 250))) % 2)
        return found

    return {
        "slopes": None,
        "log_gates": gates(),
        "future_gates": None if causal else gates(),
        "causal": causal,
    }


def _power(choose: random.Random, case: Case) -> dict[str, Any]:
    """Powers of the distance: nearly constant, nearly linear, or steep; weak and strong."""
    heads = case.q.shape[1]
    generator = torch.Generator().manual_seed(choose.randrange(2**40))
    exponents = choose.choice((0.05, 0.5, 0.9, 1.0, 1.0)) + choose.choice((0.0, 0.1, 1.0, 20.0)) * torch.rand(
        heads, generator=generator
    )
    strengths = 2.0 ** (choose.choice((-20.0, -8.0, -3.0)) + 8.0 * torch.rand(heads, generator=generator))
    return {
        "slopes": None,
        "strengths": strengths,
        "exponents": exponents,
        "logarithmic": False,
        "causal": choose.random() < 0.6,
    }


def _place(choose: random.Random, case: Case) -> dict[str, Any]:
    """Where queries stand among the keys, and which keys are real."""
    batch, _, length, _ = case.q.shape
    place = choose.choice(PLACES)
    if place in ("left_padding", "right_padding"):
        real = [choose.randint(0, length) for _ in range(batch)]
        padded = left_padding if place == "left_padding" else right_padding
        return {"key_padding_mask": padded(*real, length=length)}
    if place == "packed":
        borders = sorted(choose.randint(0, length) for _ in range(choose.randint(1, 4)))
        slopes = case.slopes if case.slopes is None or case.slopes.dim() == 1 else case.slopes[:1]
        first = {name: getattr(case, name)[:1] for name in ("q", "k", "v")}
        return {**first, "slopes": slopes, "cu_seqlens": torch.tensor([0, *borders, length])}
    queries = {"one": 1, "few": choose.randint(2, 64)}.get(place, choose.randint(65, length))
    few = {"q": case.q[:, :, -queries:]}
    return (
        few
        | {
            "whole": {"q": case.q},
            "one": {},
            "few": {},
            "inside": {"query_start": choose.randint(0, length - queries)},
            "by_row": {"query_start": torch.tensor([choose.randint(-20, length + 20) for _ in range(batch)])},
            "beyond": {"query_start": choose.choice((length + 10, length + 3000, 100_000))},
        }[place]
    )


def _norms(kind: str, case: Case) -> Tensor | None:
    """Upper bounds of the norms of keys, as a cache would keep them."""
    norms = (case.k.double().norm(dim=-1) * (1.0 + 2.0**-23)).float()
    if kind == "keys":
        return norms
    if kind == "running":
        return norms.cummax(-1).values
    if kind == "one":
        return norms.amax(-1)
    if kind == "blocks":
        missing = -norms.shape[2] % 128
        return (
            torch.nn.functional.pad(norms, (0, missing)).unflatten(2, (math.ceil(norms.shape[2] / 128), 128)).amax(-1)
        )
    return None


def _on(case: Case, device: str | torch.device) -> Case:
    values = {field.name: getattr(case, field.name) for field in fields(case)}
    return Case(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()})
