"""Baichuan-13B, MosaicBERT, DNABERT-2 and Jina v2 folders, against forwards that are written down plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.public import forwards
from tests.models.public.folders import (
    BAICHUAN,
    DNABERT,
    JINA,
    MOSAIC,
    VOCABULARY,
    Tensors,
    baichuan_tensors,
    jina_tensors,
    mosaic_tensors,
    write_folder,
)
from tests.models.saved import tiny_tokenizer
from tests.models.small import in_pieces, left_padded, random_tokens

SECOND = BAICHUAN | {"z_loss_weight": 0}  # Baichuan2
Forward = Callable[[Tensors, Tensor, Tensor], Tensor]


def without_bert(forward: Any) -> Forward:
    return lambda tensors, tokens, kinds: forward(tensors, tokens, kinds, "")


def with_bert(forward: Any) -> Forward:
    return lambda tensors, tokens, kinds: forward(tensors, tokens, kinds, "bert.")


ENCODERS: dict[str, tuple[dict[str, Any], Tensors, Forward]] = {
    "mosaic_bert": (MOSAIC, mosaic_tensors(), forwards.mosaic),
    "dnabert_2": (DNABERT, mosaic_tensors(), forwards.mosaic),
    "lodestone": (MOSAIC, mosaic_tensors("", head=False), without_bert(forwards.mosaic)),
    "jina": (JINA, jina_tensors(), forwards.jina),
    "jina_with_prefix": (JINA, jina_tensors("bert."), with_bert(forwards.jina)),
    "jina_code": (JINA, jina_tensors(code=True), forwards.jina_code),
}


def encoder(folder: Path, config: dict[str, Any], tensors: Tensors, **options: Any) -> ts.Encoder:
    model = ts.load(write_folder(folder, config, tensors), **options)
    assert isinstance(model, ts.Encoder)
    return model


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("length", [1, 40, 300])
@pytest.mark.parametrize("config", [BAICHUAN, SECOND], ids=["first", "second"])
def test_baichuan(tmp_path: Path, config: dict[str, Any], length: int, files: int) -> None:
    """Longer than model_max_length, and with a cache."""
    tensors, tokens = baichuan_tensors(), random_tokens(1, length)
    model = ts.load(write_folder(tmp_path, config, tensors, files), dtype=torch.float64)
    assert isinstance(model, ts.LanguageModel)
    expected = forwards.baichuan(tensors, tokens[0], normalised_head=config is SECOND)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-7, atol=1e-7)
    if length > 1:
        found = in_pieces(model, tokens, [length // 2, 1, length - length // 2 - 1], model.make_cache(1))
        torch.testing.assert_close(found[0], expected, rtol=1e-7, atol=1e-7)


def test_the_second_baichuan_is_told_by_its_vocabulary(tmp_path: Path) -> None:
    """125,696 tokens: the published configs need not name z_loss_weight."""
    tensors = baichuan_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(125696, 48)
    config = BAICHUAN | {"vocab_size": 125696}
    model = ts.load(write_folder(tmp_path, config, tensors))
    torch.testing.assert_close(model.head.weight.norm(dim=-1), torch.ones(125696))


@pytest.mark.parametrize("length", [1, 40, 600])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states(tmp_path: Path, name: str, length: int) -> None:
    config, tensors, forward = ENCODERS[name]
    model = encoder(tmp_path, config, tensors, dtype=torch.float64)
    tokens, kinds = random_tokens(1, length), random_tokens(1, length, vocabulary=2)
    with torch.no_grad():
        for given in (None, kinds):
            expected = forward(tensors, tokens[0], torch.zeros_like(kinds[0]) if given is None else kinds[0])
            found = model(tokens, token_types=given)[0]
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_padded_rows_and_sentence_embeddings(tmp_path: Path, name: str, side: str) -> None:
    config, tensors, forward = ENCODERS[name]
    model = encoder(tmp_path, config, tensors)
    rows = [random_tokens(1, length, seed=length)[0] for length in (70, 33)]
    tokens, mask = left_padded(rows, filler=3)
    if side == "right":
        tokens, mask, rows = tokens.flip(1), mask.flip(1), [row.flip(0) for row in rows]
    with torch.no_grad():
        hidden, pooled = model(tokens, mask), model.pool(tokens, mask)
    for index, row in enumerate(rows):
        expected = forward(tensors, row, torch.zeros_like(row)).float()
        torch.testing.assert_close(hidden[index][mask[index]], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pooled[index], expected.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mosaic_bert", "dnabert_2"])
def test_masked_token_logits(tmp_path: Path, name: str) -> None:
    config, tensors, forward = ENCODERS[name]
    model, tokens = encoder(tmp_path, config, tensors, dtype=torch.float64), random_tokens(1, 90)
    expected = forwards.masked_logits(tensors, forward(tensors, tokens[0], torch.zeros(90, dtype=torch.int64)))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(tokens))[0], expected, rtol=1e-7, atol=1e-7)
    assert expected.shape == (90, VOCABULARY)


def test_a_head_may_be_stored_twice_and_its_bias_under_another_name(tmp_path: Path) -> None:
    config, tensors, _ = ENCODERS["mosaic_bert"]
    bias = tensors["cls.predictions.decoder.bias"]
    copied = tensors | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}
    copied["cls.predictions.bias"] = bias.clone()
    once = encoder(tmp_path / "once", config, tensors)
    twice = encoder(tmp_path / "twice", config, copied)
    del copied["cls.predictions.decoder.bias"]
    other = encoder(tmp_path / "other", config, copied)
    for model in (once, twice, other):
        assert torch.equal(model.head.bias, bias)
        assert model.head.weight is model.trunk.embedding.weight
    copied["cls.predictions.decoder.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"not the same as .*, but the model has one tensor for both$"):
        encoder(tmp_path / "wrong", config, copied)


def test_an_encoder_without_head_says_so(tmp_path: Path) -> None:
    config, tensors, _ = ENCODERS["jina"]
    model, tokens = encoder(tmp_path, config, tensors), random_tokens(1, 5)
    with pytest.raises(ValueError, match="no masked-token head"):
        model.logits(model(tokens))
    with pytest.raises(ValueError, match="no masked-token head"):
        model.loss(tokens, tokens)
    ts.save(model, tmp_path / "ours")
    assert torch.equal(ts.load(tmp_path / "ours")(tokens), model(tokens))


def test_a_pooler_and_stored_positions_are_left_out(tmp_path: Path) -> None:
    config, tensors, _ = ENCODERS["jina"]
    more = tensors | {
        "pooler.dense.weight": torch.zeros(48, 48),
        "pooler.dense.bias": torch.zeros(48),
        "embeddings.position_ids": torch.arange(512)[None],
    }
    encoder(tmp_path, config, more)


def test_a_gate_of_relu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors, forward = ENCODERS["jina"]
    model = encoder(tmp_path, config | {"feed_forward_type": "reglu"}, tensors, dtype=torch.float64)
    monkeypatch.setattr(forwards, "gelu", torch.relu)
    tokens = random_tokens(1, 20)
    expected = forward(tensors, tokens[0], torch.zeros(20, dtype=torch.int64))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-7, atol=1e-7)


def test_links_to_files_elsewhere(tmp_path: Path) -> None:
    """As the cache of huggingface_hub has them."""
    real = write_folder(tmp_path / "blobs", BAICHUAN, baichuan_tensors(), files=2)
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in real.iterdir():
        (linked / path.name).symlink_to(path)
    assert torch.equal(ts.load(linked).head.weight, ts.load(real).head.weight)


def test_the_tokenizer_comes_with_the_model(tmp_path: Path) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    tokenizer = tiny_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert ts.load(tmp_path).tokenizer.to_str() == tokenizer.to_str()


def test_generation_with_a_bounded_cache(tmp_path: Path) -> None:
    """A loaded model is one of ours: the same text, in memory that does not grow."""
    model = ts.load(write_folder(tmp_path, BAICHUAN, baichuan_tensors()))
    assert isinstance(model, ts.LanguageModel)
    tokens = random_tokens(1, 40)
    plain = model.generate(tokens, max_new_tokens=30, temperature=0.0)
    assert torch.equal(model.generate(tokens, max_new_tokens=30, temperature=0.0, bounded=True), plain)


def test_half_precision_files_load_as_they_are(tmp_path: Path) -> None:
    """Jina's weights are float16, whatever the config says."""
    config, tensors, _ = ENCODERS["jina"]
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    model = encoder(tmp_path, config | {"torch_dtype": "float32"}, halves)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.pool(random_tokens(1, 20)).dtype == torch.float16
