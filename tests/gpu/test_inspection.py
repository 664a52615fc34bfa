"""inspect on a GPU: the same figures as on the CPU, up to rounding."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from trainshort.evaluation.inspect_config import InspectConfig
from trainshort.evaluation.inspection import inspect


def flat(grid: list[list[float]]) -> list[float]:
    return [value for row in grid for value in row]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_finds_what_the_cpu_finds(causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = ts.ModelConfig(vocab_size=97, d_model=128, num_layers=2, num_heads=4, causal=causal)
    model = (ts.LanguageModel(config) if causal else ts.Encoder(config)).eval().to(dtype)
    tokens = torch.randint(0, 97, (1500,)).tolist()
    wanted = inspect(model, tokens, InspectConfig())
    found = inspect(model.to("cuda"), tokens, InspectConfig())
    assert found["device"].startswith("cuda")
    close = 1e-3 if dtype == torch.float32 else 0.05
    for name in ("needed", "output", "diameter"):
        assert flat(found["heads"][name]) == pytest.approx(flat(wanted["heads"][name]), rel=close, abs=1.0 * close)
    assert max(flat(found["heads"]["skipped"])) <= found["tolerance"]
    assert flat(found["heads"]["seen"]) == pytest.approx(flat(wanted["heads"]["seen"]), abs=0.05)
    assert min(flat(found["heads"]["visited"])) < 0.6
