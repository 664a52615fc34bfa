"""Attention is computed: output and all gradients agree with float64 dense attention, feature by feature.

The allowed error comes from tests/ops/budget.py. Each feature is tried alone; random combinations follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops import hostile
from tests.ops.cases import left_padding, random_gates, right_padding
from tests.ops.contract.features import FEATURES, feature_case
from tests.ops.contract.places import MODES, Place, formats, slow_in_interpreter
from tests.ops.dense import Case
from tests.ops.layouts import LAYOUTS, every_second, sliced, transposed

BOTH: tuple[float | None, ...] = (0.0, None)  # tolerances: everything is visited, and what the default leaves


def in_mode(place: Place, feature: str, mode: str) -> Case:
    return feature_case(place, feature, **MODES[mode])


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, mode: str, place: Place) -> None:
    judge = place.judge_of(in_mode, feature, mode)
    judge.check(judge.case.run(place.backend))


def in_dtype(place: Place, feature: str, dtype: torch.dtype, tolerance: float | None) -> Case:
    return feature_case(place, feature, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(
    "feature",
    ["causal", "symmetric", "left_right_slopes", "bucket", "grouped", "fewer_queries", "left_padding", "packed"],
)
def test_feature_in_every_dtype(feature: str, dtype: torch.dtype, place: Place) -> None:
    tolerances = BOTH
    if place.backend == "triton":  # what test_feature leaves, once in every format
        tolerances = BOTH[1:] if dtype == torch.float16 else BOTH[:1]
    for tolerance in tolerances:
        judge = place.judge_of(in_dtype, feature, dtype, tolerance)
        judge.check(judge.case.run(place.backend))


@pytest.mark.parametrize("feature", ["causal_steep", "symmetric_steep", "packed_steep", "left_padding", "grouped"])
def test_feature_with_a_large_tolerance(feature: str, place: Place) -> None:
    place.check(feature_case(place, feature, dtype=place.low, tolerance=1e-2))


@pytest.mark.parametrize("length", [1, 2, 17, 31, 63, 64, 65, 127, 128, 129, 257, 700])
def test_length(length: int, place: Place) -> None:
    on_cpu = place.device == "cpu" and not place.interpreted
    dims = (1, 8, 33, 64) if on_cpu else {8, place.dim} if length < 3 else {place.dim}
    for dim in dims:
        for causal in (True, False):
            features: dict[str, Any] = {"heads": 1, "slopes": torch.tensor([0.5])} if place.interpreted else {}
            place.check(place.case(queries=length, dim=dim, causal=causal, **features))


@formats(torch.float32, "low")
@pytest.mark.parametrize("dim", [1, 8, 24, 40, 64, 80, 144, 192, 256])
def test_head_dim(dim: int, dtype: torch.dtype, place: Place) -> None:
    """Beyond 64, and beyond 128, the kernels have other tiles, which take long to compile for a GPU: there one
    direction in each format, and no sizes whose tiles another has."""
    directions: tuple[bool, ...] = (True, False)
    if place.name == "triton_gpu":
        if dim in (8, 64, 144):
            pytest.skip("another size has these tiles")
        directions = (dtype == torch.float32,)
    for causal in directions:
        slopes = {} if causal else {"slopes": place.steep}
        place.check(place.case(queries=130 if dim <= 64 else 90, dim=dim, dtype=dtype, causal=causal, **slopes))


OUT_OF_RANGE: dict[torch.dtype, set[str]] = {  # what float16 can't hold, or dense attention in 16 bits can't compute
    torch.float16: {"huge_range", "tiny_range", "aligned_keys", "outlier_key", "tiny_norms"},
    torch.bfloat16: {"huge_range", "tiny_range"},
}


def hostile_case(place: Place, name: str, dtype: torch.dtype, causal: bool, tolerance: float | None) -> Case:
    length = {"interpreted": 150, "triton_gpu": 1100}.get(place.name, 400)
    arguments = place.few_heads(hostile.FINITE[name](length, dtype))
    return place.here(Case(**arguments, causal=causal, tolerance=tolerance))


@pytest.mark.parametrize("tolerance", BOTH, ids=["everything", "windows"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs(name: str, causal: bool, tolerance: float | None, place: Place) -> None:
    judge = place.judge_of(hostile_case, name, torch.float32, causal, tolerance)
    judge.check(judge.case.run(place.backend))


@formats(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs_in_16_bits(name: str, dtype: torch.dtype, place: Place) -> None:
    if name in OUT_OF_RANGE[dtype]:
        pytest.skip(f"beyond what {dtype} can hold or compute")
    for causal in (True, False):
        judge = place.judge_of(hostile_case, name, dtype, causal, None)
        judge.check(judge.case.run(place.backend))


def strided_case(place: Place, dtype: torch.dtype, length: int) -> Case:
    return place.case(batch=2, queries=length, dim=max(place.dim, 16), dtype=dtype, slopes=place.steep)


@formats(torch.float32, "low")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(layout: Callable[[Tensor], Tensor], dtype: torch.dtype, place: Place) -> None:
    """The kernels read 16 bits of some sizes through descriptors, where the strides allow it."""
    for length in (70,) if place.interpreted else (100, 300):
        case = strided_case(place, dtype, length)
        strided = {name: layout(getattr(case, name)) for name in ("q", "k", "v")}
        place.check(replace(case, **strided))
        place.check(replace(case, q=strided["q"]))


@formats(torch.float32, "low")
@pytest.mark.parametrize("layout", [*LAYOUTS, None], ids=lambda x: x.__name__ if x else "from_a_sum")
def test_any_strides_of_the_gradient(
    layout: Callable[[Tensor], Tensor] | None, dtype: torch.dtype, place: Place
) -> None:
    """A sum hands back a gradient without memory of its own."""
    case = strided_case(place, dtype, 70 if place.interpreted else 300)
    upstream = (
        torch.ones_like(case.q[:1, :1, :1, :1]).expand_as(case.q) if layout is None else layout(case.upstream())
    )
    results = []
    for given in (upstream.contiguous(), upstream):
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
        out = replace(case, q=leaves[0], k=leaves[1], v=leaves[2]).attend(place.backend)
        results.append(torch.autograd.grad(out, leaves, given))
    for one, two in zip(*results, strict=True):
        if place.backend == "triton":
            assert torch.equal(one, two)
        torch.testing.assert_close(one, two)


def test_unlike_strides_of_the_inputs(place: Place) -> None:
    case = place.case(batch=2, queries=100, dtype=place.low)
    place.check(replace(case, q=transposed(case.q), k=sliced(case.k), v=every_second(case.v)))


@slow_in_interpreter
def test_layouts_in_turn(place: Place) -> None:
    """The same shapes with other strides and alignments: what is remembered of a call must not be mixed up."""
    case = place.case(batch=2, queries=70 if place.interpreted else 500, dtype=place.low)
    swapped = {n: transposed(getattr(case, n)) for n in ("q", "k", "v")}
    shifted = {n: torch.nn.functional.pad(getattr(case, n), (3, 2))[..., 3:-2] for n in ("q", "k", "v")}
    expanded = {n: getattr(case, n)[:1].expand(2, -1, -1, -1) for n in ("q", "k", "v")}
    for layout in (swapped, shifted, expanded, {}, {"q": swapped["q"]}, shifted, swapped):
        place.check(replace(case, **layout))


@slow_in_interpreter
def test_future_slopes_by_row_after_plain_ones(place: Place) -> None:
    """What is remembered of a first call must not be used for another kind of slopes."""
    plain = place.case(batch=2, queries=150, causal=False, future=place.steep, dtype=place.quick)
    by_row = replace(plain, future=place.steep_by_row.to(place.device))
    for case in (plain, by_row, plain, by_row):
        place.check(case)


@slow_in_interpreter
def test_alibi_attention_is_attention_with_a_linear_bias(place: Place) -> None:
    case = place.case(queries=150, heads=6)
    case = replace(case, slopes=ts.alibi_slopes(6, place.device))
    assert torch.equal(ts.alibi_attention(case.q, case.k, case.v, backend=place.backend), case.attend(place.backend))
    slopes = torch.rand(6, device=place.device) + 0.1
    short = ts.alibi_attention(case.q, case.k, case.v, slopes, backend=place.backend, causal=False)
    assert torch.equal(short, replace(case, slopes=slopes, causal=False).attend(place.backend))


@slow_in_interpreter
@pytest.mark.parametrize("seed", range(6))
def test_combinations(seed: int, place: Place) -> None:
    """Any features together."""
    for number in range(place.combinations):
        case = random_combination(place, 1000 * seed + number)
        try:
            place.check(case)
        except AssertionError as error:
            raise AssertionError(f"random_combination(place, {1000 * seed + number}): {error}") from error


def random_combination(place: Place, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    packed, causal = pick(False, False, True), pick(True, False)
    kind = pick("linear", "linear", "linear", "bucket", "none")
    kind = pick(kind, kind, "gates", "times")
    batch = 1 if packed else pick(1, 2) if place.interpreted else between(1, 3)
    heads, kv_heads = pick((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), *([] if place.interpreted else [(3, 1), (6, 2)]))
    keys = between(1, 260 if place.interpreted else 420)
    queries = keys if packed else pick(keys, between(1, 200 if place.interpreted else 420))
    tolerance, scale = pick(None, 0.0, 1e-3, 1e-2), pick(None, 1.0, 0.3)
    features: dict[str, Any] = {"causal": causal, "tolerance": tolerance, "scale": scale}

    def slopes() -> Tensor:
        return 2.0 ** (-10.0 * torch.rand(pick((heads,), (batch, heads)), generator=generator))

    if kind == "gates":
        features["log_gates"] = random_gates(pick(1, batch), heads, keys, seed)
        features["log_gates"][..., :: pick(keys + 1, 50)] = -torch.inf
    elif kind in ("linear", "times"):
        features["slopes"] = slopes()
    if kind == "linear" and not causal:
        features |= {"future": pick(None, slopes()), "offset": pick(0.0, 0.5, 1.0)}
        features["sees"] = pick(None, [pick("past", "future", "both") for _ in range(heads)])
    elif kind == "bucket":
        features |= {"bidirectional": pick(True, False), "max_distance": pick(20, 128, 300)}
        features["num_buckets"] = pick(8, 32)
    if packed:
        features["cu_seqlens"] = torch.tensor([0, *sorted(between(0, keys) for _ in range(between(0, 5))), keys])
    else:
        if pick(True, False):
            real = [between(0, keys) for _ in range(batch)]
            features["key_padding_mask"] = pick(left_padding, right_padding)(*real, length=keys)
        if pick(True, False):
            starts = [between(-10, keys + 10) for _ in range(batch)]
            features["query_start"] = pick(starts[0], torch.tensor(starts))
    return place.case(
        batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, bias=kind, seed=seed,
        dtype=pick(*place.dtypes, torch.float32), dim=pick(1, 4, 16, 24, 40), **features,
    )  # fmt: skip
