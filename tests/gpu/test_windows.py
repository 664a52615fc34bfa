"""Windows on the GPU, as ts.certified_windows tells them: sound, small, and open to what is not finite."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import gpu_case, on_gpu
from tests.ops import hostile
from tests.ops.contract.test_features import OUT_OF_RANGE
from tests.ops.dense import Case, dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_windows_are_sound(causal: bool, dtype: torch.dtype) -> None:
    """No query skips more softmax mass than the tolerance; asked twice, because kernels are remembered."""
    for name in (name for name in hostile.FINITE if name not in OUT_OF_RANGE.get(dtype, ())):
        for tolerance in (2.0**-14, 0.1):
            case = on_gpu(Case(**hostile.FINITE[name](1100, dtype), causal=causal, tolerance=tolerance))
            for _ in range(2):
                kept = case.kept(64)
                skipped = float(dense(case)[1].masked_fill(kept, 0.0).sum(-1).max())
                assert skipped <= tolerance * (1.0 + 1e-9), (name, tolerance)


def test_windows_skip_something() -> None:
    case = gpu_case(queries=4096, heads=2, batch=1, dim=64, dtype=torch.bfloat16, slopes=torch.tensor([0.9, 0.2]))
    assert float(case.kept(64).double().mean()) < 0.15


@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_what_is_not_finite_is_visited(name: str) -> None:
    arguments = hostile.NON_FINITE[name](1100)
    tensor, row, head, position = arguments.pop("poisoned")
    case = on_gpu(Case(**arguments))
    whole = (case.kept(64) | ~case.seen)[row, head]
    assert bool(whole[position].all())
    assert tensor == "q" or bool(whole[position:].all())
    with torch.no_grad():
        out = case.attend("triton")
    assert bool(torch.isfinite(out[1 - row]).all())
    if "nan" in name:
        assert bool(torch.isnan(out[row, head, position]).all())
