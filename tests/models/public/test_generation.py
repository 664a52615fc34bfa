"""Generation with loaded public models: prompts in pieces, padded batches, windows on each backend, bounded caches.

The texts are those of transformers, where it has the model; the kernels are in tests/ops/triton/test_public.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.public.folders import BAICHUAN, baichuan_tensors, write_folder
from tests.models.small import in_pieces, left_padded, random_tokens
from tests.ops.cases import windows_whatever_they_cost
from trainshort.models import bounded_keys, cache, generate, layers, ring_sizes
from trainshort.ops.threads import one_thread

pytest.importorskip("transformers")

from tests.models.public.native import FALCON, bloom, falcon, mpt

pytestmark = [pytest.mark.transformers, pytest.mark.slow]
LENGTHS = (600, 137, 1)  # of the prompts
HEADS = 6
STEEP = {"slopes": [3.0, 2.5, 2.0, 3.5, 4.0, 2.2]}


def storywriter(folder: Path) -> None:
    """An MPT with slopes to 2^-16 and clipped queries, keys and values, which transformers computes otherwise."""
    mpt(HEADS).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["attn_config"].update({"alibi_bias_max": 16, "clip_qkv": 1})
    path.write_text(json.dumps(config))


NATIVE: dict[str, Callable[[], Any]] = {
    "bloom": lambda: bloom(HEADS),
    "bloom-untied": lambda: bloom(HEADS, tie_word_embeddings=False),
    "mpt": lambda: mpt(HEADS, {"clip_qkv": 0.7}),
    **{f"falcon-{name}": lambda name=name: falcon(HEADS, **FALCON[name]) for name in FALCON},
}
OTHERS: dict[str, Callable[[Path], Any]] = {
    "mpt-storywriter": storywriter,
    "baichuan": lambda folder: write_folder(folder, BAICHUAN, baichuan_tensors()),
    "baichuan2": lambda folder: write_folder(folder, BAICHUAN | {"z_loss_weight": 0}, baichuan_tensors()),
}


@pytest.fixture(scope="module", params=[*NATIVE, *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name is that of the family."""
    folder = tmp_path_factory.mktemp("models") / request.param
    if request.param in NATIVE:
        NATIVE[request.param]().save_pretrained(folder)
    else:
        OTHERS[request.param](folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def loaded(folder: Path, **options: Any) -> ts.LanguageModel:
    model = ts.load(folder, **options)
    assert isinstance(model, ts.LanguageModel)
    return model


def padded_prompts(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    return left_padded([random_tokens(1, length, seed=length)[0] for length in lengths], filler=7)


def greedy(model: ts.LanguageModel, tokens: Tensor, mask: Tensor | None, count: int = 16, **options: Any) -> Tensor:
    return model.generate(tokens, key_padding_mask=mask, max_new_tokens=count, temperature=0.0, **options)


def test_long_prompts_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the configured length, in a batch with short ones: the texts of transformers, and of no cache at all."""
    model, (tokens, mask) = loaded(folder), padded_prompts()
    pieces: list[int] = []
    model.trunk.register_forward_pre_hook(lambda _, arguments: pieces.append(arguments[0].shape[1]))
    monkeypatch.setattr(generate, "PREFILL", 128)
    found = greedy(model, tokens, mask)
    assert pieces == [128, 128, 128, 128, 88] + [1] * 15
    assert torch.equal(found, greedy(model, tokens, mask, use_cache=False))
    assert len({tuple(row.tolist()) for row in found[:, 600:]}) > 1
    if folder.name in NATIVE:
        theirs = NATIVE[folder.name]()
        theirs.config.max_seq_len = 1000  # of MPT, which refuses longer texts
        options = {"max_new_tokens": 16, "do_sample": False, "use_cache": True}
        # A float mask keeps Falcon from rounding its positions.
        assert torch.equal(theirs.generate(tokens, attention_mask=mask.float(), **options), found)


def test_each_row_alone(folder: Path) -> None:
    model, (tokens, mask) = loaded(folder), padded_prompts()
    together = greedy(model, tokens, mask)
    for row, length in enumerate(LENGTHS):
        alone = greedy(model, tokens[row : row + 1, -length:], None)
        assert torch.equal(alone[0], together[row, -length - 16 :])


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_decoding_on_each_backend(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of steps after a long prompt are those of the whole text without a cache, by the specification."""
    model, tokens = loaded(folder, dtype=torch.float64), random_tokens(2, 620)
    monkeypatch.setattr(layers, "attention", partial(ts.attention, backend="reference"))
    with torch.no_grad():
        expected = model(tokens)
    monkeypatch.setattr(cache, "attention", partial(ts.attention, backend=backend))
    found = in_pieces(model, tokens, [300, 300, *[1] * 12, 8], model.make_cache(2))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_steps_read_what_the_windows_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slopes so steep that no head sees the beginning of the text: whatever lies there is not read."""
    model = loaded(folder, position_options=STEEP)
    monkeypatch.setattr(cache, "attention", partial(ts.attention, backend="blocked"))
    tokens = random_tokens(1, 900)
    with torch.no_grad():
        expected = model(tokens)[:, 890:]
    filled = model.make_cache(1)
    in_pieces(model, tokens[:, :890], [890], filled)
    for values in filled.values:
        values[:, :, :512] = math.nan
    with windows_whatever_they_cost():
        found = in_pieces(model, tokens[:, 890:], [1] * 10, filled)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, STEEP], ids=["own_slopes", "steep"])
def test_bounded_caches(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts, padded rows and all, while heads forget what they can't see any more."""
    monkeypatch.setattr(bounded_keys, "FIRST_CAPACITY", 32)
    monkeypatch.setattr(bounded_keys, "SETTLE", 96)
    for module in (bounded_keys, ring_sizes):
        monkeypatch.setattr(module, "BLOCK", 8)
    model, (tokens, mask) = loaded(folder, position_options=options), padded_prompts((300, 137, 1))
    expected = greedy(model, tokens, mask, count=200)
    made: list[Any] = []
    make = model.make_cache
    monkeypatch.setattr(
        model, "make_cache", lambda *given, **options: made.append(make(*given, **options)) or made[-1]
    )
    assert torch.equal(greedy(model, tokens, mask, count=200, bounded=True), expected)
    report = made[0].report()
    assert report.tokens == 499
    # By their own slopes heads that share keys see all of so short a text.
    assert report.evictions > 0 or (not options and model.config.kv_heads < HEADS)
