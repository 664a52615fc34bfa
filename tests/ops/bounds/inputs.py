"""Inputs that leave a bound no room, and what is asserted of them.

Skipped keys point exactly where the query does, so that Cauchy-Schwarz is an equation; the keys that vouch for the
query weigh alike, so that Jensen's inequality is one; and all keys in between repel, so that nothing else adds to the
total.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.certificates import FLOAT64_NOISE, shares
from tests.ops.dense import Case

DIM = 8

DIRECTION = torch.linspace(1.0, 2.0, DIM) / torch.linspace(1.0, 2.0, DIM).norm()


def geometric(low: float, high: float, count: int) -> list[float]:
    """Tolerances from low to high, evenly in their logarithm."""
    return torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64).tolist()


def assert_tight(case: Case, blocks: Sequence[int], tolerances: Sequence[float], at_least: float) -> None:
    """No query skips more than a tolerance, and in every row of heads some query skips nearly all of one."""
    most = torch.stack([share.amax((0, 2)) for share in shares(case, blocks, tolerances).values()]).amax(0)  # [H]
    assert float(most.max()) <= 1.0 + FLOAT64_NOISE, f"skipped {float(most.max())} times the tolerance"
    assert float(most.min()) >= at_least, f"skipped only {float(most.min())} times the tolerance: too loose to tell"


def assert_certified(
    *cases: Case, blocks: Sequence[int] = (1, 16), tolerances: Sequence[float] = (1e-4, 1e-2, 0.3)
) -> None:
    """No query skips more than a tolerance, however little it is."""
    for case in cases:
        worst = max(float(share.max()) for share in shares(case, blocks, tolerances).values())
        assert worst <= 1.0 + FLOAT64_NOISE, f"skipped {worst} times the tolerance"


def along(signs: Tensor, lengths: Tensor | float = 1.0) -> Tensor:
    """Keys or queries of these signs and lengths along one direction: [..., T] -> [..., T, D]."""
    return (signs * lengths)[..., None] * DIRECTION


def ambush(
    *,
    queries: int,
    keys: int,
    vouching: range,
    repelling: range,
    slope: float,
    place: int | None = None,
    ahead: int | None = None,
    size: float = 6.0,
    **features,
) -> Case:
    """Keys at these distances before the last query vouch for it or repel it; all older ones attract it.

    Keys behind that query repel, those `ahead` of it or more attract. All other queries are zero: they want no wider
    window. place: the position of the last query, at the end of the keys if None. size: the exponent s‖q‖‖k‖.
    """  # fmt: skip
    place = keys - 1 if place is None else place
    distance = place - torch.arange(keys)
    signs = torch.ones(keys)
    signs[(distance >= repelling.start) & (distance < repelling.stop)] = -1.0
    signs[(distance < 0) & (distance > -(keys if ahead is None else ahead))] = -1.0
    signs[(distance >= vouching.start) & (distance < vouching.stop)] = 1.0
    k = along(signs)[None, None]
    q = along((torch.arange(queries) == queries - 1).float(), size * DIM**0.5)[None, None]
    features = {"query_start": place - queries + 1, "slopes": torch.tensor([slope])} | features
    return Case(q=q, k=k, v=torch.zeros_like(k), **features)


def mirrored(case: Case) -> Case:
    """The same case with past and future exchanged."""
    start = case.k.shape[2] - int(case.query_start) - case.q.shape[2]  # type: ignore[arg-type]
    return replace(case, q=case.q.flip(2), k=case.k.flip(2), query_start=start)


def by_heads(cases: Sequence[Case]) -> Case:
    """Cases of one shape as the heads of one."""
    q, k, v = (torch.cat([getattr(case, name) for case in cases], dim=1) for name in ("q", "k", "v"))
    slopes = torch.cat([case.slopes for case in cases if case.slopes is not None])
    norms = [case.key_norms for case in cases if case.key_norms is not None]
    return replace(cases[0], q=q, k=k, v=v, slopes=slopes, key_norms=torch.cat(norms, dim=1) if norms else None)


def by_means(run: int, slope: float, queries: int = 160, **features) -> Case:
    """Many queries: the mean of the `run` keys before the tile of 32 queries vouches for the last of them."""
    in_tile = (queries - 1) % 32 + 1
    near, repelling = range(in_tile, in_tile + run), range(round(5.0 / slope))
    return ambush(queries=queries, keys=1400, vouching=near, repelling=repelling, slope=slope, **features)


def few(slope: float = 0.3, queries: int = 1, keys: int = 400, **features) -> Case:
    """Few queries: the 64 nearest keys themselves vouch, here those at a distance of 0 to 3."""
    return ambush(queries=queries, keys=keys, vouching=range(4), repelling=range(64), slope=slope, **features)


FINE = geometric(2e-9, 4e-9, 9)  # a step is a tenth of what one key of slope 0.3 more or less makes


def blocks_of(norms: Tensor, kind: str) -> Tensor:
    """Norms of keys as a caller may keep them: for each key, the largest of each 128, or the largest of all."""
    if kind == "keys":
        return norms
    if kind == "one":
        return norms.amax(-1)
    missing = -norms.shape[2] % 128
    return torch.nn.functional.pad(norms, (0, missing)).unflatten(2, (-1, 128)).amax(-1)


def upper_norms(k: Tensor) -> Tensor:
    return (k.double().norm(dim=-1) * (1.0 + 2.0**-23)).float()


def decoding_case(keys: int, slope: float, size: float = 6.0, repel: int = 200, own: float = 1.0, **features) -> Case:
    """The own key aligned with the query, those before it repel, all older ones attract."""
    case = ambush(queries=1, keys=keys, vouching=range(1), repelling=range(repel), slope=slope, size=size, **features)
    k = case.k.clone()
    k[:, :, -1] *= own
    return replace(case, k=k, key_norms=upper_norms(k).amax(-1))


def each_way(case: Case) -> Case:
    return replace(case, causal=False)


LAYOUTS: dict[str, dict] = {
    "causal": {"queries": 330},
    "symmetric": {"queries": 330, "causal": False},
    "one_sided": {"queries": 330, "causal": False, "sees": ("past", "future", "both")},
    "left_right": {"queries": 330, "causal": False, "future": torch.tensor([0.1, 0.9, 0.3]), "offset": 0.7},
    "packed": {"batch": 1, "queries": 330, "cu_seqlens": torch.tensor([0, 5, 5, 6, 100, 201, 202, 330])},
    "packed_symmetric": {
        "batch": 1,
        "queries": 330,
        "causal": False,
        "cu_seqlens": torch.tensor([0, 1, 190, 191, 210, 330]),
    },
    "packed_long": {"batch": 1, "queries": 640, "cu_seqlens": torch.tensor([0, 100, 640])},
    "packed_ahead": {
        "batch": 1,
        "queries": 640,
        "cu_seqlens": torch.tensor([0, 540, 640]),
        "causal": False,
        "sees": ("future",) * 3,
    },
    "left_padded": {"queries": 330, "key_padding_mask": left_padding(330, 133, length=330)},
    "right_padded": {"queries": 330, "key_padding_mask": right_padding(330, 100, length=330)},
    "padded_symmetric": {"queries": 330, "causal": False, "key_padding_mask": left_padding(320, 100, length=330)},
    "more_queries": {"queries": 330, "keys": 200},
    "more_queries_symmetric": {"queries": 330, "keys": 200, "causal": False},
    "start": {"queries": 100, "keys": 330, "query_start": 150},
    "start_symmetric": {"queries": 100, "keys": 330, "query_start": 150, "causal": False},
    "start_by_row": {"queries": 70, "keys": 330, "query_start": torch.tensor([250, 20])},
    "start_beyond": {"queries": 70, "keys": 330, "query_start": 500},
    "grouped": {"queries": 330, "heads": 6, "kv_heads": 2, "slopes": torch.tensor([0.9, 0.3, 0.1, 0.2, 0.5, 0.05])},
    "slopes_by_row": {"queries": 330, "slopes": torch.tensor([[0.9, 0.3, 0.1], [0.05, 0.2, 0.8]])},
    "few": {"queries": 9, "keys": 330},
    "one_gentle": {
        "queries": 330,
        "heads": 6,
        "kv_heads": 3,
        "slopes": torch.tensor([1e-3, 1e-3, 0.9, 0.3, 0.1, 1e-3]),
    },
}


def layout(name: str, **more) -> Case:
    """Random inputs; the keys of later heads are longer."""
    case = random_case(**({"slopes": torch.tensor([0.9, 0.3, 0.1]), "dim": DIM} | LAYOUTS[name] | more))
    return replace(case, k=case.k * torch.linspace(0.3, 2.0, case.k.shape[1]).to(case.k.dtype)[:, None, None])
