"""Windows keep their promise wherever keys are skipped: no query ever skips more softmax mass than the tolerance.

The mass is computed in float64 from the very inputs, for every query. On a CPU over what ts.certified_windows says,
which the blocked backend visits; of the kernels over what they visit in the forward pass, which may use up half of
the tolerance, and in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops import hostile
from tests.ops.cases import left_padding, right_padding
from tests.ops.certificates import FLOAT64_NOISE, assert_monotone, skipped, span_of
from tests.ops.contract.places import Place, at, formats
from tests.ops.contract.test_features import OUT_OF_RANGE
from tests.ops.dense import Case, dense
from tests.ops.triton.interpreter import kept_by_both

pytestmark = at("blocked", "interpreted", "triton_gpu")
BLOCKS = [1, 16, 64, 128]
TOLERANCES = [2.0**-24, 2.0**-14, 1e-2, 0.3]
THREE = torch.tensor([0.9, 0.3, 0.1])


def assert_certified(
    case: Case, blocks: Sequence[int] = BLOCKS, tolerances: Sequence[float] = TOLERANCES, at_least: float = 0.0
) -> None:
    """At no tolerance does a query skip more; `at_least` is the share of it that some query must really skip."""
    batch, heads, queries, _ = case.q.shape
    asked = list(itertools.product(tolerances, blocks))
    spans = []
    for tolerance, block in asked:
        windows = replace(case, tolerance=tolerance).windows(block)
        assert windows.dtype == torch.int32
        assert windows.shape == (batch, heads, -(-queries // block), 2)
        assert int(windows.min()) >= 0
        assert int(windows.max()) <= -(-case.k.shape[2] // block)
        assert_monotone(windows)
        spans.append(span_of(case, windows, block))
    for (tolerance, block), mass in zip(asked, skipped(case, spans), strict=True):
        share = float(mass.max()) / tolerance
        assert share <= 1.0 + FLOAT64_NOISE, f"skipped {share} times the tolerance of {tolerance}, blocks of {block}"
        assert share >= at_least, f"skipped only {share} times the tolerance of {tolerance}: too loose to be tested"


def assert_sound(case: Case, place: Place, tolerances: Sequence[float] = TOLERANCES) -> None:
    if place.backend == "blocked":
        assert_certified(case, tolerances=tolerances)
        return
    weights = dense(case)[1]
    for tolerance in tolerances:
        given = replace(case, tolerance=tolerance)
        for kept, allowed in zip(kept_by_both(given), (0.5, 1.0), strict=True):
            share = float(weights.masked_fill(kept, 0.0).sum(-1).max()) / tolerance
            assert share <= allowed + FLOAT64_NOISE, f"skipped {share} times the tolerance of {tolerance}"
            sees = case.seen.any(-1)
            assert bool((kept & case.seen).any(-1)[sees].all()), "a query that sees keys must keep one"


def length_of(place: Place) -> int:
    return {"interpreted": 400, "triton_gpu": 1100}.get(place.name, 600)


def gates(place: Place, **more: Any) -> dict[str, Any]:
    return {"bias": "gates", "slopes": None} | more


def extreme_gates(length: int) -> torch.Tensor:
    """Of four heads: open gates and one that is all but closed, closed ones among gentle ones, nearly open ones that
    become steep, and one in a hundred that lets little pass."""
    gates = torch.zeros((1, 4, length))
    gates[:, 0, length // 2] = -1e5
    gates[:, 1] = -0.05
    gates[:, 1, [length // 3, length // 3 + 1, length * 3 // 4]] = -torch.inf
    gates[:, 2] = -1e-8
    gates[:, 2, length // 2 :] = -0.4
    gates[:, 3, ::100] = -9.0
    return gates


LAYOUTS: dict[str, Callable[[Place, int], dict[str, Any]]] = {
    "causal": lambda p, n: {},
    "causal_gentle": lambda p, n: {"heads": 2, "slopes": torch.tensor([0.05, 1e-4])},
    "symmetric": lambda p, n: {"causal": False},
    "one_sided": lambda p, n: {"heads": 2, "causal": False, "slopes": THREE[:2], "sees": ("past", "future")},
    "mixed_sight": lambda p, n: {"heads": 3, "causal": False, "slopes": THREE, "sees": ("both", "future", "past")},
    "left_right": lambda p, n: {"causal": False, "future": p.steep.flip(0)},
    "left_right_offset": lambda p, n: {"causal": False, "future": p.steep.flip(0) / 3, "offset": 0.7},
    "left_right_by_row": lambda p, n: {"batch": 2, "causal": False, "slopes": p.steep_by_row, "future": p.steep},
    "by_row": lambda p, n: {"batch": 2, "slopes": p.steep_by_row},
    "offset": lambda p, n: {"causal": False, "offset": 1.0},
    "left_padding": lambda p, n: {"batch": 2, "key_padding_mask": left_padding(n, n * 5 // 9, length=n)},
    "right_padding": lambda p, n: {"batch": 2, "key_padding_mask": right_padding(n - 10, 100, length=n)},
    "padding_symmetric": lambda p, n: {
        "batch": 2, "causal": False, "key_padding_mask": left_padding(n - 10, 100, length=n),
    },
    "no_key": lambda p, n: {"batch": 2, "key_padding_mask": left_padding(n, 0, length=n)},
    "no_key_symmetric": lambda p, n: {
        "batch": 2, "causal": False, "key_padding_mask": left_padding(n - 10, 0, length=n),
    },
    "packed": lambda p, n: {"batch": 1, "cu_seqlens": torch.tensor([0, 5, 5, n // 2, n * 3 // 4, n])},
    "packed_symmetric": lambda p, n: {
        "batch": 1, "causal": False, "cu_seqlens": torch.tensor([0, n // 2 - 10, n // 2 + 10, n]),
    },
    "fewer_queries": lambda p, n: {"queries": 70, "keys": n},
    "one_query": lambda p, n: {"queries": 1, "keys": n},
    "fewer_queries_symmetric": lambda p, n: {"queries": n // 3, "keys": n, "causal": False},
    "more_queries": lambda p, n: {"keys": n * 2 // 3},
    "more_queries_symmetric": lambda p, n: {"keys": n * 2 // 3, "causal": False},
    "query_start": lambda p, n: {"queries": 100, "keys": n, "query_start": n // 2},
    "query_start_by_row": lambda p, n: {
        "batch": 2, "queries": 100, "keys": n, "query_start": torch.tensor([n - 110, -10]),
    },
    "query_start_beyond": lambda p, n: {"queries": 100, "keys": n, "query_start": n + 20, "slopes": p.steep / 10},
    "query_start_beyond_symmetric": lambda p, n: {
        "queries": 100, "keys": n, "query_start": n + 50, "slopes": p.steep / 10, "causal": False,
    },
    "query_start_before_symmetric": lambda p, n: {"queries": 100, "keys": n, "query_start": -60, "causal": False},
    "query_start_symmetric": lambda p, n: {"queries": 100, "keys": n, "query_start": n * 2 // 5, "causal": False},
    "padding_and_query_start": lambda p, n: {
        "batch": 2, "queries": 100, "keys": n, "query_start": torch.tensor([n - 110, n // 3]),
        "key_padding_mask": torch.arange(n).expand(2, -1) >= torch.tensor([[100], [50]]),
    },
    "grouped": lambda p, n: {"heads": 4, "kv_heads": 2, "slopes": torch.tensor([0.9, 0.01, 0.3, 0.1])},
    "grouped_symmetric": lambda p, n: {
        "heads": 6, "kv_heads": 3, "slopes": THREE.repeat_interleave(2), "causal": False,
    },
    "one_key_head": lambda p, n: {"heads": 4, "kv_heads": 1, "slopes": torch.tensor([0.9, 0.5, 0.1, 1e-3])},
    "scaled": lambda p, n: {"scale": 2.0},
    "scaled_negative": lambda p, n: {"scale": -2.0},
    "one_dimension": lambda p, n: {"dim": 1, "scale": 3.0},
    "forty_dimensions": lambda p, n: {"dim": 40, "dtype": p.low},
    "gates": lambda p, n: gates(p),
    "gates_symmetric": lambda p, n: gates(p, causal=False),
    "gates_grouped": lambda p, n: gates(p, heads=4, kv_heads=2),
    "gates_packed": lambda p, n: gates(p, batch=1, cu_seqlens=torch.tensor([0, 5, 5, n // 2, n * 3 // 4, n])),
    "gates_padded_symmetric": lambda p, n: gates(
        p, batch=2, causal=False, key_padding_mask=left_padding(n - 10, 100, length=n)
    ),
    "gates_query_start": lambda p, n: gates(p, queries=100, keys=n, query_start=n // 2, causal=False),
    "gates_extreme": lambda p, n: gates(p, batch=1, heads=4, log_gates=extreme_gates(n)),
    "gates_extreme_symmetric": lambda p, n: gates(
        p, batch=1, heads=4, causal=False, log_gates=extreme_gates(n), future_gates=extreme_gates(n).flip(1)
    ),
    "times": lambda p, n: {"bias": "times"},
    "times_symmetric": lambda p, n: {"bias": "times", "causal": False},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, place: Place) -> None:
    length = length_of(place)
    case = place.case(**{"queries": length, "slopes": place.steep} | LAYOUTS[layout](place, length))
    assert_sound(case, place, TOLERANCES[1:] if place.interpreted else TOLERANCES)
    assert_sound(replace(case, q=4.0 * case.q, k=3.0 * case.k + 1.0), place, [0.2])


def test_every_dtype(dtype: torch.dtype, place: Place) -> None:
    assert_sound(place.case(queries=length_of(place), slopes=place.steep, dtype=dtype), place)


def hostile_case(place: Place, name: str, dtype: torch.dtype, causal: bool) -> Case:
    length = {"blocked": 640}.get(place.name, length_of(place))
    return place.here(Case(**place.few_heads(hostile.FINITE[name](length, dtype)), causal=causal))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs(name: str, causal: bool, place: Place) -> None:
    case = hostile_case(place, name, torch.float32, causal)
    assert_sound(case, place, [2.0**-24, 0.2] if place.interpreted else TOLERANCES)


@formats(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs_in_16_bits(name: str, dtype: torch.dtype, place: Place) -> None:
    if name in OUT_OF_RANGE[dtype]:
        pytest.skip(f"beyond what {dtype} can hold or compute")
    assert_sound(hostile_case(place, name, dtype, True), place, [2.0**-14])


@pytest.mark.parametrize("seed", range(12))
def test_random_stretches(seed: int, place: Place) -> None:
    """Keys of any length, with and without a common part, loud and quiet queries; a sample never saw the longest."""
    generator = torch.Generator().manual_seed(seed)
    dtype = place.low if seed % 3 == 0 else torch.float32
    case = place.case(
        batch=1, heads=2, queries=450 if place.device == "cuda" else 330, dim=16, causal=seed % 2 == 0, seed=seed,
        dtype=dtype, slopes=2.0 ** (-8.0 * torch.rand(2, generator=generator)),
    )  # fmt: skip
    stretch = 10.0 ** torch.empty(case.k.shape[:3]).uniform_(-2.0, 1.5, generator=generator)[..., None]
    shift = (seed % 4) * 2.0 * torch.randn(16, generator=generator)
    loud = 10.0 ** torch.empty(case.q.shape[:3]).uniform_(-1.0, 0.7, generator=generator)[..., None]
    k = (case.k.cpu().float() * stretch + shift).to(dtype)
    q = (case.q.cpu().float() * loud).to(dtype)
    assert_sound(place.here(replace(case, k=k, q=q)), place, [2.0**-14, 0.2])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("position", [3, 60, 70, 120, 250])
def test_a_long_key_anywhere_in_its_block(position: int, causal: bool, place: Place) -> None:
    """A bound for a whole unit says nothing of a part of it: windows must not end inside."""
    case = place.case(queries=450, slopes=place.steep, causal=causal)
    k = case.k.clone()
    k[:, :, position] *= 40.0
    assert_sound(replace(case, k=k), place, [2.0**-14, 0.2])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_what_is_not_finite_is_visited(name: str, causal: bool, place: Place) -> None:
    """By every query that sees it, in a key; in a query, it makes that query see all."""
    for slopes in (torch.full((4,), 0.9999), torch.tensor(hostile.STEEP_AND_GENTLE)):
        arguments = hostile.NON_FINITE[name](300 if place.interpreted else 640) | {"slopes": slopes}
        tensor, row, head, position = arguments.pop("poisoned")
        if place.interpreted:
            arguments |= {n: arguments[n][[row]][:, [head]] for n in ("q", "k", "v")} | {"slopes": slopes[[head]]}
            row, head = 0, 0
        case = place.here(Case(**arguments, causal=causal, tolerance=2.0**-14))
        for kept in [case.kept(block) for block in BLOCKS] if place.backend == "blocked" else kept_by_both(case):
            missed = (case.seen & ~kept)[row, head]  # [Tq, Tk]
            if tensor == "q":
                assert not bool(missed[position].any())
            else:
                assert not bool(missed[:, position].any())
            if tensor == "k" and place.backend == "triton":  # whoever may see such a key visits everything
                assert not bool(missed[position:].any())
                assert causal or not bool(missed.any())
