"""Decoding: a few queries at the end of a cache, with and without the norms that the cache keeps, nobody recording.

Nothing asks for a gradient here, so that a backend may take a shorter way; it must mean the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.budget import error_budget, size
from tests.ops.cases import left_padding
from tests.ops.contract.places import WITH_WINDOWS, Place, at
from tests.ops.contract.test_windows import extreme_gates
from tests.ops.dense import Case, dense

KINDS = ["none", "one", "blocks", "keys", "running"]
FOUR = torch.tensor([0.9, 0.5, 0.1, 0.7])
FOUR_UNLIKE = torch.tensor([0.9, 1e-3, 0.5, 0.01])


def with_norms(case: Case, kind: str) -> Case:
    """Upper bounds of the norms of real keys, as a cache would keep them."""
    norms = case.k.double().norm(dim=-1).to(case.k.dtype) * (1.0 + 2.0**-20)
    if case.key_padding_mask is not None:
        norms = norms.masked_fill(~case.key_padding_mask[:, None], 0.0)
    missing = -norms.shape[2] % 128
    given = {
        "none": None,
        "one": norms.amax(-1),
        "blocks": torch.nn.functional.pad(norms, (0, missing)).unflatten(2, (-1, 128)).amax(-1),
        "keys": norms,
        "running": norms.cummax(-1).values,
    }
    return replace(case, key_norms=given[kind])


def assert_output_within_budget(case: Case, place: Place) -> None:
    with torch.no_grad():
        out = case.attend(place.backend)
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    error = size("out", out.double() - dense(case)[0])
    allowed = error_budget(case)["out"]
    assert bool((error <= allowed).all()), f"{float((error / allowed).max())} times what is allowed"


def padded(keys: int, *real: int) -> dict[str, Any]:
    return {"batch": 2, "keys": keys, "key_padding_mask": left_padding(*real, length=keys)}


CACHES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "one_key": lambda p: {"keys": 1},
    "short": lambda p: {"keys": 100},
    "one_block": lambda p: {"keys": 128},
    "two_blocks": lambda p: {"keys": 129},
    "long": lambda p: {"keys": p.cache},
    "steep": lambda p: {"keys": p.cache, "slopes": p.steep},
    "gentle": lambda p: {"keys": p.cache, "slopes": torch.full((p.heads,), 1e-3)},
    "slopes_by_row": lambda p: {"batch": 2, "keys": p.cache, "slopes": p.steep_by_row},
    "grouped": lambda p: {"keys": p.cache, "heads": 6, "kv_heads": 2},
    "grouped_unlike_slopes": lambda p: {"keys": p.cache, "heads": 4, "kv_heads": 2, "slopes": FOUR_UNLIKE},
    "one_key_head": lambda p: {"keys": p.cache, "heads": 4, "kv_heads": 1, "slopes": FOUR},
    "padded_within_a_block": lambda p: padded(100, 100, 40),
    "padded": lambda p: padded(p.cache // 2, p.cache // 2, 140),
    "padded_steep": lambda p: padded(p.cache // 2, p.cache // 2, 100) | {"slopes": p.steep},
    "padded_to_the_last_block": lambda p: padded(p.cache // 2, p.cache // 2, 3) | {"slopes": p.steep},
    "padded_on_the_right": lambda p: {
        "batch": 2, "keys": 300, "key_padding_mask": left_padding(300, 200, length=300).flip(1),
    },
    "padded_away": lambda p: padded(300, 300, 0),
    "start": lambda p: {"keys": 300, "query_start": 299},
    "start_inside": lambda p: {"keys": p.cache // 2, "query_start": p.cache // 3, "slopes": p.steep},
    "start_beyond": lambda p: {"keys": 200, "query_start": 290, "slopes": p.steep / 10},
    "start_before": lambda p: {"keys": 100, "queries": 9, "query_start": -4},
    "start_by_row": lambda p: {
        "batch": 2, "keys": p.cache // 2, "query_start": torch.tensor([p.cache // 2 - 1, 20]), "slopes": p.steep,
    },
    "start_by_row_before": lambda p: {
        "batch": 2, "keys": 300, "query_start": torch.tensor([299, -1]), "slopes": p.steep,
    },
    "symmetric": lambda p: {"keys": p.cache // 2, "causal": False},
    "two_queries": lambda p: {"keys": p.cache // 2, "queries": 2},
    "seven_queries": lambda p: {"keys": p.cache // 2, "queries": 7, "slopes": p.steep},
    "sixteen_queries": lambda p: {"keys": 300, "queries": 16, "heads": 4, "kv_heads": 1},
    "seventeen_queries": lambda p: {"keys": 200, "queries": 17},
    "bucket": lambda p: {"keys": p.cache // 2, "bias": "bucket"},
    "bucket_queries": lambda p: {
        "keys": 200, "queries": 5, "heads": 4, "kv_heads": 2, "bias": "bucket", "max_distance": 60,
    },
    "gates": lambda p: {"keys": p.cache, "bias": "gates"},
    "gates_grouped_queries": lambda p: {"keys": 300, "queries": 5, "heads": 4, "kv_heads": 2, "bias": "gates"},
    "gates_padded": lambda p: padded(p.cache // 2, p.cache // 2, 140) | {"bias": "gates"},
    "gates_start_by_row": lambda p: {
        "batch": 2, "keys": 300, "query_start": torch.tensor([299, 20]), "bias": "gates",
    },
    "gates_extreme": lambda p: {
        "batch": 1, "heads": 4, "keys": p.cache // 2, "bias": "gates", "log_gates": extreme_gates(p.cache // 2),
    },
    "times": lambda p: {"keys": p.cache // 2, "bias": "times", "slopes": p.steep},
    "no_bias": lambda p: {"keys": p.cache // 2, "bias": "none"},
    "scaled": lambda p: {"keys": p.cache // 2, "scale": 1.0},
    "scaled_negative": lambda p: {"keys": p.cache // 2, "scale": -0.4, "slopes": p.steep},
    "wide_heads": lambda p: {"keys": p.cache // 2, "dim": 80},
    "odd_head_dim": lambda p: {"keys": 200, "dim": 24, "slopes": p.steep},
}  # fmt: skip


def cache(place: Place, name: str, **more: Any) -> Case:
    return place.case(**{"queries": 1} | CACHES[name](place) | more)


@pytest.mark.parametrize("name", CACHES)
def test_every_cache(name: str, place: Place) -> None:
    for kind in KINDS:
        few = (None, 1e-3) if kind == "keys" else (1e-3,)
        for tolerance in few if place.interpreted else (0.0, None, 1e-2):
            assert_output_within_budget(with_norms(cache(place, name, tolerance=tolerance), kind), place)


@pytest.mark.parametrize("name", ["long", "steep", "grouped", "padded", "seven_queries", "start_by_row"])
def test_every_dtype(name: str, dtype: torch.dtype, place: Place) -> None:
    case = cache(place, name, dtype=dtype)
    for kind in KINDS:
        assert_output_within_budget(with_norms(case, kind), place)


@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_caches(name: str, place: Place) -> None:
    arguments = place.few_heads(hostile.FINITE[name](300 if place.interpreted else 900))
    for queries in (3,) if place.interpreted else (1, 3):
        few = arguments | {"q": arguments["q"][:, :, -queries:]}
        for tolerance in (None, 1e-2):
            for kind in ("one", "keys") if place.interpreted else KINDS:
                assert_output_within_budget(with_norms(place.here(Case(**few, tolerance=tolerance)), kind), place)


@at(*WITH_WINDOWS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_visit_everything(value: float, place: Place) -> None:
    """The first value is out of the window, but its weight is no zero: it shows only if everything is visited."""
    case = place.case(batch=1, heads=2, queries=1, keys=300, slopes=torch.tensor([0.25, 0.3]))
    case = with_norms(case, "keys")
    assert case.key_norms is not None
    case.v[0, 0, 0] = math.nan
    with torch.no_grad():
        assert bool(torch.isfinite(case.attend(place.backend)).all())
        for position in (0, 150, 299):
            norms = case.key_norms.clone()
            norms[0, 0, position] = value
            assert bool(torch.isnan(replace(case, key_norms=norms).attend(place.backend)[0, 0]).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "first_key", "near_key", "own_key"])
def test_what_is_not_finite_shows(where: str, value: float, place: Place) -> None:
    for keys in (60, 300) if place.interpreted else (60, 700):
        case = place.case(queries=1, keys=keys, slopes=place.steep)
        position = {"first_key": 0, "near_key": keys - 30, "own_key": keys - 1}.get(where, 0)
        tensor = case.q if where == "q" else case.k
        tensor[-1, 1, position, 3] = value
        truth = dense(case)[0]
        for kind in KINDS:
            with torch.no_grad():
                out = with_norms(case, kind).attend(place.backend)
            assert torch.equal(torch.isnan(out), torch.isnan(truth)), kind
            torch.testing.assert_close(out, truth.float(), equal_nan=True)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(
    "name",
    ["padded_within_a_block", "padded", "padded_steep", "padded_to_the_last_block", "padded_on_the_right",
     "start_inside", "start_by_row"],
)  # fmt: skip
def test_garbage_where_nobody_looks(name: str, garbage: float, place: Place) -> None:
    case = cache(place, name)
    hole = ~case.seen.any(2).any(1)[:, None, :, None]
    assert bool(hole.any())
    for kind in KINDS:
        clean = with_norms(replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0)), kind)
        dirty = replace(clean, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage))
        with torch.no_grad():
            assert torch.equal(dirty.attend(place.backend), clean.attend(place.backend)), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_a_preallocated_cache(kind: str, place: Place) -> None:
    """[B, T, H, D] in memory, with room behind it."""
    keys = 200 if place.interpreted else 300
    case = place.case(batch=2, queries=1, keys=keys, slopes=place.steep)

    def inside(tensor: Tensor) -> Tensor:
        heads, dim = tensor.shape[1], tensor.shape[3]
        room = torch.full((2, keys + 300, heads, dim), math.nan, dtype=tensor.dtype, device=tensor.device)
        room[:, :keys] = tensor.transpose(1, 2)
        return room[:, :keys].transpose(1, 2)

    viewed = replace(case, k=inside(case.k), v=inside(case.v))
    assert_output_within_budget(with_norms(viewed, kind), place)
    assert_output_within_budget(with_norms(replace(viewed, query_start=keys - 1), kind), place)


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_nothing(kind: str, place: Place) -> None:
    """Whoever asks for a gradient gets it, even if it is the slopes alone."""
    keys = 200 if place.interpreted else 700
    case = with_norms(place.case(queries=1, keys=keys, slopes=place.steep), kind)
    with torch.no_grad():
        out = case.attend(place.backend)
    for name in ("q", "k", "v", "slopes"):
        leaf = getattr(case, name).clone().requires_grad_()
        recorded = replace(case, **{name: leaf}).attend(place.backend)
        assert recorded.requires_grad, name
        torch.testing.assert_close(recorded.detach(), out)
        recorded.sum().backward()
        assert leaf.grad is not None
    if place.backend != "triton":  # whose weights of a single query in a steep head are good to 20 bits
        place.check(case)
    place.check(with_norms(place.case(queries=1, keys=keys), kind))


@at(*WITH_WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_unvisited_values_are_not_read(kind: str, place: Place) -> None:
    """Values far out of the window may be NaN: nobody reads them."""
    if kind == "none" and place.backend == "triton":
        pytest.skip("the kernels skip nothing in decoding where they know no norms")
    slopes = torch.tensor([0.9, 0.5, 0.3, 0.7])[: place.heads]
    keys = 300 if place.interpreted else 2000
    case = with_norms(place.case(queries=1, keys=keys, slopes=slopes), kind)
    if place.name == "blocked":
        kept = case.kept()[:, :, 0]  # [B, H, Tk]: exactly what ts.certified_windows says
        assert float(kept.double().mean()) < 0.3
    else:
        kept = torch.arange(keys, device=place.device) >= keys // 5
    poisoned = replace(case, v=case.v.masked_fill(~kept[..., None], math.nan))
    with torch.no_grad():
        torch.testing.assert_close(poisoned.attend(place.backend), case.attend(place.backend))


def test_step_by_step_is_all_at_once(place: Place) -> None:
    """Token after token into preallocated memory full of NaN, with the norms so far: the rows of one causal call."""
    length = 30 if place.interpreted else 150
    whole = place.case(queries=length, slopes=place.steep)
    room = {n: torch.full_like(getattr(whole, n), math.nan).repeat(1, 1, 2, 1) for n in ("k", "v")}
    allowed = 2.0 * error_budget(whole)["out"]
    with torch.no_grad():
        rows = []
        for step in range(length):
            for name, memory in room.items():
                memory[:, :, step] = getattr(whole, name)[:, :, step]
            # Alternately with all of the memory and the query's place in it, for all rows and by row, and without.
            start = (None, step, torch.full((whole.q.shape[0],), step, device=place.device))[step % 3]
            end = step + 1 if start is None else 2 * length
            norms = whole.k[:, :, : step + 1].norm(dim=-1).amax(-1) * (1.0 + 2.0**-20)
            now = replace(
                whole, q=whole.q[:, :, step : step + 1], k=room["k"][:, :, :end], v=room["v"][:, :, :end],
                query_start=start, key_norms=norms,
            )  # fmt: skip
            rows.append(now.attend(place.backend))
        difference = torch.cat(rows, dim=2).double() - whole.attend(place.backend)
    assert bool((size("out", difference) <= allowed).all())


def test_fewer_key_heads_of_the_same_cache(place: Place) -> None:
    """Views of one cache have the same strides: what is remembered must know how many heads share a key."""
    case = place.case(batch=1, heads=4, queries=1, keys=40, slopes=torch.tensor([0.9, 0.5, 0.2, 0.1]))
    for heads in (4, 2, 1, 4):
        assert_output_within_budget(replace(case, k=case.k[:, :heads], v=case.v[:, :heads]), place)


@pytest.mark.parametrize("start", [2**30 - 500, 2**30 + 100, 2**31 - 1000, 2**31 + 5, 2**40])
def test_a_position_far_beyond_the_keys(start: int, place: Place) -> None:
    """Only how far keys are from each other counts then."""
    case = place.case(batch=1, heads=2, queries=1, keys=200, slopes=torch.tensor([0.05, 1e-8]))
    near = with_norms(replace(case, query_start=300), "one")
    with torch.no_grad():
        far = replace(near, query_start=start).attend(place.backend)
        torch.testing.assert_close(far, near.attend(place.backend))
