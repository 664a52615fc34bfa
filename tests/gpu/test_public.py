"""Public checkpoints straight onto the GPU: the logits and hidden states of the CPU, and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.models.public.folders import BAICHUAN, JINA, MOSAIC, baichuan_tensors, jina_tensors, mosaic_tensors
from tests.models.public.folders import write_folder as written
from tests.models.small import language_model, left_padded, random_tokens

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


NATIVE = ["bloom", "mpt", "falcon-multi_query", "falcon-like_rw", "falcon-grouped"]


@pytest.mark.parametrize("name", NATIVE)
def test_the_texts_of_transformers(tmp_path: Path, name: str) -> None:
    """Padded rows, one of them beyond MPT's configured length: with graphs, without, and with a bounded cache."""
    pytest.importorskip("transformers")
    from tests.models.public.native import FALCON, bloom, falcon, mpt

    family, _, kind = name.partition("-")
    made = {"bloom": lambda: bloom(6), "mpt": lambda: mpt(6, {"clip_qkv": 0.7}, max_seq_len=512)}
    theirs = falcon(6, **FALCON[kind]) if family == "falcon" else made[family]()
    theirs.save_pretrained(tmp_path)
    model = ts.load(tmp_path, device="cuda")
    assert isinstance(model, ts.LanguageModel)
    tokens, mask = left_padded([random_tokens(1, length, seed=length)[0] for length in (300, 37)])
    # On the CPU, and with a float mask, which keeps Falcon from rounding its positions.
    expected = theirs.generate(
        tokens, attention_mask=mask.float(), max_new_tokens=16, do_sample=False, use_cache=True
    )
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.0, "key_padding_mask": mask.cuda()}
    for way in ({"cuda_graph": True}, {"cuda_graph": False}, {"bounded": True}):
        assert torch.equal(model.generate(tokens.cuda(), **options, **way).cpu(), expected), way


def test_an_exported_model(tmp_path: Path) -> None:
    """From the GPU to a BLOOM folder, and back."""
    from trainshort.models.checkpoints.bloom import SHAPE

    model = language_model(dtype=torch.bfloat16, **SHAPE).cuda()
    ts.save(model, tmp_path / "out", format="bloom")
    tokens = random_tokens(2, 300).cuda()
    with torch.no_grad():
        assert torch.equal(ts.load(tmp_path / "out", device="cuda")(tokens), model(tokens))


@pytest.mark.parametrize("stepping", [False, True])
def test_steps_read_what_the_windows_hold(tmp_path: Path, stepping: bool) -> None:
    """With slopes so steep that no head sees the beginning of the text: whatever lies there is not read."""
    folder, tokens = written(tmp_path, BAICHUAN, baichuan_tensors()), random_tokens(1, 8000).cuda()
    model = ts.load(folder, device="cuda", position_options={"slopes": [3.0, 2.5, 2.0, 3.5, 4.0, 2.2]})
    assert isinstance(model, ts.LanguageModel)
    cache = model.make_cache(1, 8100)
    with torch.no_grad():
        expected = model(tokens)[:, -3:]
        model(tokens[:, :-3], cache=cache)
        for values in cache.values:
            values[:, :, :4096] = torch.nan
        if stepping:
            cache.begin_steps()
        found = torch.cat([model(token, cache=cache) for token in tokens[:, -3:].split(1, dim=1)], dim=1)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)
