"""Public models through the kernels, in Triton's interpreter: prompts, steps with windows, bounded caches."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.models.public.folders import BAICHUAN, baichuan_tensors, write_folder
from tests.models.small import left_padded, random_tokens
from tests.ops.triton.test_bounded_steps import graphs  # noqa: F401  a fixture
from tests.ops.triton.test_stepping import FakeGraph, assert_same_logits, both, pretending, steps  # noqa: F401
from trainshort.models import cache, layers

pytestmark = pytest.mark.slow
STEEP = {"slopes": [3.0, 2.5, 2.0, 3.5, 4.0, 2.2]}
NAMES = ["bloom", "mpt-clipped", "falcon-multi_query", "falcon-like_rw", "falcon-grouped", "baichuan"]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "baichuan":
        return write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    pytest.importorskip("transformers")
    from tests.models.public.native import FALCON, bloom, falcon, mpt

    family, _, kind = request.param.partition("-")
    made = {"bloom": lambda: bloom(6), "mpt": lambda: mpt(6, {"clip_qkv": 0.7})}
    model = falcon(6, **FALCON[kind]) if family == "falcon" else made[family]()
    model.save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path, **options: Any) -> ts.LanguageModel:
    model = ts.load(folder, **options)
    assert isinstance(model, ts.LanguageModel)
    return model


@pytest.mark.parametrize("folder", ["mpt-clipped", "falcon-multi_query"], indirect=True)
def test_prompts_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = loaded(folder), random_tokens(1, 110)
    monkeypatch.setattr(layers, "attention", partial(ts.attention, backend="reference"))
    monkeypatch.setattr(cache, "attention", partial(ts.attention, backend="triton"))
    with torch.no_grad():
        expected, filled = model(tokens), model.make_cache(1)
        found = [model(part, cache=filled) for part in tokens.split([70, 1, 30, 9], dim=1)]
    assert_same_logits(torch.cat(found, dim=1), expected)


def test_steps_of_padded_rows(folder: Path) -> None:
    prompt, mask = left_padded([random_tokens(1, length, seed=length)[0] for length in (130, 40)], filler=3)
    assert_same_logits(*both(loaded(folder), prompt, random_tokens(2, 3, seed=1), key_padding_mask=mask))


def test_steps_read_what_the_windows_hold(folder: Path) -> None:
    """With slopes so steep that no head sees the beginning of the text: whatever lies there is not read."""
    model, tokens = loaded(folder, position_options=STEEP), random_tokens(1, 902)
    filled = model.make_cache(1, 1000)
    with torch.no_grad():
        expected = model(tokens)[:, -2:]
        model(tokens[:, :-2], cache=filled)
    for values in filled.values:
        values[:, :, :512] = math.nan
    filled.begin_steps()
    assert_same_logits(steps(model, filled, tokens[:, -2:]), expected)


@pytest.mark.parametrize("folder", ["bloom", "falcon-grouped"], indirect=True)
def test_bounded_caches(folder: Path, graphs: type[FakeGraph]) -> None:  # noqa: F811
    """In steps that are replayed, while rings evict: the tokens of a full cache."""
    model = loaded(folder, position_options=STEEP)
    prompt, mask = left_padded([random_tokens(1, length, seed=length)[0] for length in (110, 20)])
    options: dict[str, Any] = {"max_new_tokens": 12, "key_padding_mask": mask, "temperature": 0.0}
    expected = model.generate(prompt, cuda_graph=False, **options)
    assert torch.equal(model.generate(prompt, bounded=True, **options), expected)
    assert sum(graph.replays for graph in graphs.made) > 5
