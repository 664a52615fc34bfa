"""Public checkpoints straight onto the GPU: the logits and hidden states of the CPU, and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.models.public.folders import BAICHUAN, JINA, MOSAIC, baichuan_tensors, jina_tensors, mosaic_tensors
from tests.models.public.folders import write_folder as written
from tests.models.small import random_tokens

FOLDERS: dict[str, tuple[dict[str, Any], Any]] = {
    "baichuan": (BAICHUAN, baichuan_tensors),
    "baichuan_2": (BAICHUAN | {"z_loss_weight": 0}, baichuan_tensors),
    "mosaic_bert": (MOSAIC, mosaic_tensors),
    "jina_code": (JINA, lambda: jina_tensors(code=True)),
}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)], ids=str)
@pytest.mark.parametrize("name", FOLDERS)
def test_on_the_gpu_as_on_the_cpu(tmp_path: Path, name: str, dtype: torch.dtype, limit: float) -> None:
    config, make = FOLDERS[name]
    folder, tokens = written(tmp_path, config, make(), files=3), random_tokens(2, 500)
    model = ts.load(folder, dtype=dtype, device="cuda")
    assert {(each.dtype, each.device.type) for each in model.parameters()} == {(dtype, "cuda")}
    assert model.position.slopes.is_cuda
    with torch.no_grad():
        expected, found = ts.load(folder)(tokens), model(tokens.cuda())
    error = (found.float().cpu() - expected).abs().max() / expected.abs().max()
    assert error < limit


def test_generation(tmp_path: Path) -> None:
    folder, tokens = written(tmp_path, BAICHUAN, baichuan_tensors()), random_tokens(2, 50)
    model = ts.load(folder, device="cuda")
    assert isinstance(model, ts.LanguageModel)
    with_graph = model.generate(tokens.cuda(), max_new_tokens=20, temperature=0.0)
    assert torch.equal(
        with_graph, model.generate(tokens.cuda(), max_new_tokens=20, temperature=0.0, cuda_graph=False)
    )
