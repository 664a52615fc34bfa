"""The kernels compute attention: output and all gradients agree with float64 dense attention, feature by feature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.cases import random_case
from tests.ops.dense import Case
from tests.ops.layouts import LAYOUTS, every_second, sliced, transposed
from tests.ops.triton.features import FEATURES, STEEP, small, symmetric
from tests.ops.triton.interpreter import shipped_tiles
from tests.ops.triton.rounding import KernelJudge

MODES = {
    "windows_float32": {"dtype": torch.float32},
    "everything_float16": {"dtype": torch.float16, "tolerance": 0.0},
}


def check(case: Case) -> None:
    KernelJudge(case).check(case.run("triton"))


VARIATIONS = ("bucket_", "no_bias_", "query_start_", "packed_", "left_right_slopes_", "more_", "slopes_by_row_")


def _marks(feature: str, mode: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if mode == "everything_float16" and feature.startswith(VARIATIONS) else []


@pytest.mark.parametrize(
    ("feature", "mode"),
    [pytest.param(feature, mode, marks=_marks(feature, mode)) for feature in FEATURES for mode in MODES],
)
def test_feature(feature: str, mode: str) -> None:
    check(random_case(**FEATURES[feature], **MODES[mode]))


@pytest.mark.parametrize("feature", ["causal_steep", "symmetric_steep", "packed_steep", "left_padding", "grouped"])
def test_feature_with_a_large_tolerance(feature: str) -> None:
    check(random_case(**FEATURES[feature], dtype=torch.float16, tolerance=1e-2))


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["causal", "symmetric_steep", "bucket_symmetric", "packed"])
def test_feature_with_the_tiles_of_a_small_gpu(feature: str) -> None:
    with shipped_tiles():
        check(random_case(**FEATURES[feature]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 24, 40, 64])
def test_head_dim(dim: int, dtype: torch.dtype) -> None:
    check(random_case(**small(dim=dim, dtype=dtype, queries=130)))
    check(random_case(**symmetric(dim=dim, dtype=dtype, queries=100, slopes=STEEP)))


def test_wide_heads() -> None:
    """Beyond what the smallest tiles are for: another row of the table."""
    for dim in (80, 144):
        check(random_case(**small(dim=dim, dtype=torch.float16, queries=90)))


@pytest.mark.parametrize("length", [1, 2, 31, 63, 64, 65, 127, 128, 129, 257])
def test_length(length: int) -> None:
    for causal in (True, False):
        check(random_case(**small(queries=length, causal=causal, heads=1, slopes=torch.tensor([0.5]))))


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs(name: str, causal: bool) -> None:
    """One row and two heads of the shared set, the steepest and the gentlest."""
    arguments = hostile.FINITE[name](150)
    arguments = arguments | {n: arguments[n][-1:, ::3] for n in "qkv"}
    slopes = arguments["slopes"]
    check(Case(**arguments | {"slopes": slopes[-1:, ::3] if slopes.dim() == 2 else slopes[::3]}, causal=causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(layout, dtype: torch.dtype) -> None:
    """float16 of these sizes is read through descriptors where its strides allow it."""
    case = random_case(**small(batch=2, queries=70, dtype=dtype, slopes=STEEP))
    strided = {name: layout(getattr(case, name)) for name in ("q", "k", "v")}
    check(replace(case, **strided))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, None], ids=lambda x: x.__name__ if x else "from_a_sum")
def test_any_strides_of_the_gradient(layout, dtype: torch.dtype) -> None:
    case = random_case(**small(batch=2, queries=70, dtype=dtype, slopes=STEEP))
    upstream = torch.ones_like(case.q) if layout is None else layout(case.upstream())
    results = []
    for given in (
        upstream.contiguous(),
        torch.ones((), dtype=dtype).expand_as(case.q) if layout is None else upstream,
    ):
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
        out = replace(case, q=leaves[0], k=leaves[1], v=leaves[2]).attend("triton")
        results.append(torch.autograd.grad(out, leaves, given))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_unlike_strides_of_the_inputs() -> None:
    case = random_case(**small(batch=2, queries=100, dtype=torch.float16))
    check(replace(case, q=transposed(case.q), k=sliced(case.k), v=every_second(case.v)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_combinations(seed: int) -> None:
    check(random_combination(seed))


def random_combination(seed: int) -> Case:
    """Any features together, from a seed."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    packed, causal, kind = pick(False, False, True), pick(True, False), pick("linear", "linear", "bucket", "none")
    batch = 1 if packed else pick(1, 2)
    heads, kv_heads = pick((1, 1), (2, 1), (2, 2), (3, 3), (4, 2))
    keys = between(1, 260)
    queries = keys if packed else pick(keys, between(1, 200))
    features: dict = {"causal": causal, "tolerance": pick(None, 0.0, 1e-2), "scale": pick(None, 1.0, 0.3)}

    def slopes() -> Tensor:
        return 2.0 ** (-9.0 * torch.rand(pick((heads,), (batch, heads)), generator=generator))

    if kind == "linear":
        features["slopes"] = slopes()
        if not causal:
            features |= {"future": pick(None, slopes()), "offset": pick(0.0, 0.5, 1.0)}
            features["sees"] = pick(None, [pick("past", "future", "both") for _ in range(heads)])
    elif kind == "bucket":
        features |= {"bidirectional": pick(True, False), "max_distance": pick(20, 128), "num_buckets": 8}
    if packed:
        borders = sorted(between(0, keys) for _ in range(between(0, 4)))
        features["cu_seqlens"] = torch.tensor([0, *borders, keys])
    elif pick(True, False):
        real = torch.tensor([[between(0, keys)] for _ in range(batch)])
        index = torch.arange(keys).expand(batch, -1)
        features["key_padding_mask"] = pick(index < real, index >= keys - real)
    if not packed and pick(True, False):
        features["query_start"] = pick(between(-10, keys + 10), torch.tensor([between(-10, keys + 10)] * batch))
    return random_case(
        batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, bias=kind, seed=seed,
        dtype=pick(torch.float16, torch.float32), dim=pick(4, 16, 24), **features,
    )  # fmt: skip
