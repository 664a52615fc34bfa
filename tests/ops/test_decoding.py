"""Decoding: one query at the end of a cache, with and without the norms that the cache keeps, nobody recording.

Nothing asks for a gradient here, so that a backend may take a shorter way; it must mean the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.budget import assert_within_budget, error_budget, size
from tests.ops.cases import BACKENDS, left_padding, random_case
from tests.ops.dense import Case, dense

STEEP = torch.tensor([0.9, 0.3, 0.05])
KINDS = ["none", "one", "blocks", "keys", "running"]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


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


def assert_output_within_budget(case: Case, backend: str) -> None:
    with torch.no_grad():
        out = case.attend(backend)
    assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
    error = size("out", out.double() - dense(case)[0])
    allowed = error_budget(case)["out"]
    assert bool((error <= allowed).all()), f"{float((error / allowed).max())} times what is allowed"


CACHES: dict[str, dict] = {
    "one_key": {"keys": 1},
    "short": {"keys": 100},
    "one_block": {"keys": 128},
    "two_blocks": {"keys": 129},
    "long": {"keys": 1000},
    "steep": {"keys": 1000, "slopes": STEEP},
    "gentle": {"keys": 1000, "slopes": torch.full((3,), 1e-3)},
    "slopes_by_row": {"keys": 1000, "slopes": torch.stack((STEEP, STEEP.flip(0)))},
    "grouped": {"keys": 1000, "heads": 6, "kv_heads": 2},
    "grouped_unlike_slopes": {
        "keys": 1000,
        "heads": 4,
        "kv_heads": 2,
        "slopes": torch.tensor([0.9, 1e-3, 0.5, 0.01]),
    },
    "one_key_head": {"keys": 1000, "heads": 4, "kv_heads": 1, "slopes": torch.tensor([0.9, 0.5, 0.1, 1e-3])},
    "padded_within_a_block": {"keys": 100, "key_padding_mask": left_padding(100, 40, length=100)},
    "padded": {"keys": 500, "key_padding_mask": left_padding(500, 140, length=500)},
    "padded_to_the_last_block": {"keys": 500, "slopes": STEEP, "key_padding_mask": left_padding(500, 3, length=500)},
    "padded_on_the_right": {"keys": 300, "key_padding_mask": left_padding(300, 200, length=300).flip(1)},
    "padded_away": {"keys": 300, "key_padding_mask": left_padding(300, 0, length=300)},
    "start": {"keys": 500, "query_start": 499},
    "start_inside": {"keys": 500, "query_start": 301},
    "start_by_row": {"keys": 500, "query_start": torch.tensor([499, 20])},
    "symmetric": {"keys": 500, "causal": False},
    "two_queries": {"keys": 500, "queries": 2},
    "seven_queries": {"keys": 500, "queries": 7, "slopes": STEEP},
    "bucket": {"keys": 500, "bias": "bucket"},
    "no_bias": {"keys": 500, "bias": "none"},
    "scaled": {"keys": 500, "scale": 1.0},
    "scaled_negative": {"keys": 500, "scale": -0.4},
    "wide_heads": {"keys": 500, "dim": 80},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CACHES)
def test_every_cache(name: str, kind: str, backend: str) -> None:
    for tolerance in (0.0, None, 1e-2):
        case = random_case(**({"queries": 1} | CACHES[name]), tolerance=tolerance)
        assert_output_within_budget(with_norms(case, kind), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["long", "steep", "grouped", "padded"])
def test_every_dtype(name: str, dtype: torch.dtype, backend: str) -> None:
    case = random_case(**({"queries": 1} | CACHES[name]), dtype=dtype)
    for kind in KINDS:
        assert_output_within_budget(with_norms(case, kind), backend)


@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_caches(name: str, backend: str) -> None:
    arguments = hostile.FINITE[name](900)
    arguments["q"] = arguments["q"][:, :, -1:]
    for tolerance in (None, 1e-2):
        for kind in KINDS:
            assert_output_within_budget(with_norms(Case(**arguments, tolerance=tolerance), kind), backend)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "first_key", "near_key", "own_key"])
def test_what_is_not_finite_shows(where: str, value: float, backend: str) -> None:
    for keys in (60, 700):
        case = random_case(queries=1, keys=keys, slopes=STEEP)
        place = {"first_key": 0, "near_key": keys - 30, "own_key": keys - 1}
        tensor = case.q if where == "q" else case.k
        tensor[1, 2, place.get(where, 0), 3] = value
        truth = dense(case)[0]
        for kind in KINDS:
            with torch.no_grad():
                out = with_norms(case, kind).attend(backend)
            assert torch.equal(torch.isnan(out), torch.isnan(truth)), kind
            torch.testing.assert_close(out, truth.float(), equal_nan=True)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_leaks(kind: str, garbage: float, backend: str) -> None:
    for keys, real in ((100, (100, 40)), (500, (500, 140)), (500, (490, 5))):
        case = random_case(queries=1, keys=keys, slopes=STEEP, key_padding_mask=left_padding(*real, length=keys))
        assert case.key_padding_mask is not None
        hole = ~case.key_padding_mask[:, None, :, None]
        clean = with_norms(replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0)), kind)
        dirty = replace(clean, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage))
        with torch.no_grad():
            assert torch.equal(dirty.attend(backend), clean.attend(backend))


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_a_preallocated_cache(kind: str, backend: str) -> None:
    """[B, T, H, D] in memory, with room behind it."""
    case = random_case(queries=1, keys=300, slopes=STEEP)

    def inside(tensor: Tensor) -> Tensor:
        room = torch.full((2, 1000, 3, 8), math.nan)
        room[:, :300] = tensor.transpose(1, 2)
        return room[:, :300].transpose(1, 2)

    viewed = replace(case, k=inside(case.k), v=inside(case.v))
    assert_output_within_budget(with_norms(viewed, kind), backend)
    whole = replace(viewed, k=inside(case.k)[:, :, :300], query_start=299)
    assert_output_within_budget(with_norms(whole, kind), backend)


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_nothing(kind: str, backend: str) -> None:
    """Whoever asks for a gradient gets it, even if it is the slopes alone."""
    case = with_norms(random_case(queries=1, keys=700, slopes=STEEP.clone()), kind)
    with torch.no_grad():
        out = case.attend(backend)
    for name in ("q", "k", "v", "slopes"):
        leaf = getattr(case, name).clone().requires_grad_()
        recorded = replace(case, **{name: leaf}).attend(backend)
        assert recorded.requires_grad, name
        torch.testing.assert_close(recorded.detach(), out)
        recorded.sum().backward()
        assert leaf.grad is not None
    assert_within_budget(case.run(backend), case)


@pytest.mark.parametrize("kind", KINDS)
def test_unvisited_values_are_not_read(kind: str, backend: str) -> None:
    """The keys visited are those of ts.certified_windows, for a single query too."""
    if backend == "reference":
        pytest.skip("the reference visits everything")
    case = with_norms(random_case(queries=1, keys=2000, slopes=torch.tensor([0.9, 0.5, 0.3])), kind)
    kept = case.kept()[:, :, 0]  # [B, H, Tk]
    assert float(kept.double().mean()) < 0.3
    poisoned = replace(case, v=case.v.masked_fill(~kept[..., None], math.nan))
    with torch.no_grad():
        torch.testing.assert_close(poisoned.attend(backend), case.attend(backend))


def test_step_by_step_is_all_at_once(backend: str) -> None:
    """Token after token with a growing cache and the norms of it: the rows of one causal call."""
    whole = random_case(queries=150, slopes=STEEP)
    allowed = 2.0 * error_budget(whole)["out"]
    with torch.no_grad():
        rows = []
        for position in range(150):
            step = replace(
                whole,
                q=whole.q[:, :, position : position + 1],
                k=whole.k[:, :, : position + 1],
                v=whole.v[:, :, : position + 1],
            )
            rows.append(with_norms(step, "one").attend(backend))
        difference = torch.cat(rows, dim=2).double() - whole.attend(backend)
    assert bool((size("out", difference) <= allowed).all())
