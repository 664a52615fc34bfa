"""The parts that attention may have besides: with a cache, in padded and packed rows, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.models.small import FOX_PRO, in_pieces, language_model, left_padded, random_tokens

PARTS: list[dict[str, Any]] = [
    {"qk_norm": True},
    {"wide_qk_norm": True},
    {"kv_shift": True},
    {"output_norm": True, "output_gate": True},
    FOX_PRO,
]
POSITIONS = ["alibi", "fox", "rotary"]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts))
@pytest.mark.parametrize("sizes", [[7, 128, 1, 64], [1, 1, 198], [200]], ids=str)
def test_a_cache_changes_nothing(sizes: list[int], parts: dict[str, Any], position: str) -> None:
    model, tokens = language_model(position, num_kv_heads=2, **parts), random_tokens(2, 200)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(in_pieces(model, tokens, sizes, model.make_cache(2)), expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", POSITIONS)
def test_left_padded_rows_are_those_rows_alone(position: str) -> None:
    """Nothing is shifted out of padding into the first token."""
    model = language_model(position, **FOX_PRO)
    rows = [random_tokens(1, length, seed=length)[0] for length in (90, 31, 1)]
    tokens, mask = left_padded(rows, filler=3)
    later = random_tokens(3, 10, seed=9)
    cache = model.make_cache(3)
    with torch.no_grad():
        first = model(tokens, cache=cache, key_padding_mask=mask)
        found = torch.cat((first, *(model(part, cache=cache) for part in later.split([1, 9], dim=1))), dim=1)
        for index, row in enumerate(rows):
            whole = torch.cat((row, later[index]))[None]
            torch.testing.assert_close(found[index, -whole.shape[1] :], model(whole)[0], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", POSITIONS)
def test_packed_documents_are_documents_alone(position: str) -> None:
    """Nothing is shifted across a border."""
    model, tokens, lengths = language_model(position, **FOX_PRO), random_tokens(1, 100), [40, 1, 0, 59]
    packed = model(tokens, cu_seqlens=torch.tensor([0, 40, 41, 41, 100]))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_a_bounded_cache_shifts_too() -> None:
    model, tokens = language_model(position_options={"scale": 30.0}, **FOX_PRO), random_tokens(1, 3000)
    cache = model.make_cache(1, bounded=True)
    found = in_pieces(model, tokens, [1500, 1, 1, 700, 798], cache)
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens), rtol=2e-5, atol=5e-4)
    assert cache.report().evictions > 0, "nothing was evicted"


def test_a_call_that_fails_halfway_can_be_made_again() -> None:
    """Also where the keys of the last token before the shift are kept."""
    model, tokens = language_model(**FOX_PRO), random_tokens(1, 30)
    cache = model.make_cache(1)
    with torch.no_grad():
        expected = model(tokens)
        model(tokens[:, :20], cache=cache)
        out = model.trunk.blocks[1].ffn.forward
        model.trunk.blocks[1].ffn.forward = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, 20:], cache=cache)
        model.trunk.blocks[1].ffn.forward = out  # type: ignore[method-assign]
        torch.testing.assert_close(model(tokens[:, 20:], cache=cache), expected[:, 20:], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", POSITIONS)
def test_saved_and_loaded(tmp_path: Path, position: str) -> None:
    model, tokens = language_model(position, **FOX_PRO), random_tokens(2, 50)
    ts.save(model, tmp_path)
    loaded = ts.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_normed_keys_are_as_long_as_their_weights_say() -> None:
    model, tokens = language_model(qk_norm=True, norm_eps=0.0), random_tokens(1, 60)
    cache = model.make_cache(1)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.attention.key_norm.weight.fill_(0.5)
        model(tokens, cache=cache)
    for keys in cache.keys:
        torch.testing.assert_close(keys[:, :, :60].norm(dim=-1), torch.full((1, 4, 60), 0.5 * 8**0.5))


def test_in_16_bits_the_parts_keep_the_dtype() -> None:
    model, tokens = language_model("fox", dtype=torch.bfloat16, **FOX_PRO), random_tokens(1, 40)
    with torch.no_grad():
        logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        exact = language_model("fox", **FOX_PRO)(tokens)
    error = (logits.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error.item() < 0.1
