"""Folders that cannot be loaded: one sentence that names the file and the tensor or field, and nothing allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.cli.run_cli import run_cli
from tests.hostile_json import EVERY, survives
from tests.models.public.folders import (
    BAICHUAN,
    DNABERT,
    JINA,
    MOSAIC,
    Tensors,
    baichuan_tensors,
    jina_tensors,
    mosaic_tensors,
    write_folder,
)
from trainshort.models.checkpoints import layout

Change = Callable[[Tensors], Any]
INDEX = "model.safetensors.index.json"
BLOOM = {"model_type": "bloom", "hidden_size": 48, "n_head": 6, "n_layer": 2, "vocab_size": 61}
MPT: dict[str, Any] = {"model_type": "mpt", "d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 61}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "alibi": True,
}


@pytest.fixture
def nothing_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong is found before the first tensor of the model is made."""

    def fail(*_: Any) -> Any:
        raise AssertionError("a tensor of the model was made")

    monkeypatch.setattr(layout, "_filled", fail)


def assert_refused(folder: Path, file: str, *parts: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        ts.load(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / file}: ") or (file == "" and text.startswith(f"{folder}: ")), text
    assert "\n" not in text
    assert len(text) < 600
    for part in parts:
        assert part in text


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop(NORM), (f"{NORM!r} is missing (1 in all)",)),
        (lambda tensors: tensors.pop("lm_head.weight"), ("'lm_head.weight' is missing",)),
        (lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}), ("'model.extra.weight' is not in",)),
        (lambda tensors: tensors.update({NORM: torch.ones(49)}), (f"{NORM!r} is [49], the config wants [48]",)),
        (lambda tensors: tensors.update({NORM: torch.ones(48, 1)}), ("is [48, 1], the config wants [48]",)),
        (lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int64)}), (f"{NORM!r} is I64",)),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(41, 48)}),
            ("'model.layers.0.mlp.gate_proj.weight' is [41, 48], the config wants [40, 48]",),
        ),
        (lambda tensors: tensors.update({NORM[6:]: torch.ones(48)}), ("with and without the prefix 'model.'",)),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: Change, parts: tuple[str, ...]) -> None:
    tensors = baichuan_tensors()
    change(tensors)
    assert_refused(write_folder(tmp_path, BAICHUAN, tensors), "model.safetensors", *parts)


@pytest.mark.usefixtures("nothing_filled")
def test_names_of_another_model(tmp_path: Path) -> None:
    """Where most tensors are missing, the error shows a name that is there."""
    tensors = {f"module.{name}": tensor for name, tensor in mosaic_tensors().items()}
    shown = "it has 'module.bert.embeddings.LayerNorm.bias'"
    assert_refused(write_folder(tmp_path, MOSAIC, tensors), "model.safetensors", "(26 in all)", shown)


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file(tmp_path: Path, size: int) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(tmp_path, "model.safetensors", "not a whole safetensors file", "download it again")


@pytest.mark.usefixtures("nothing_filled")
def test_one_truncated_file_of_several(tmp_path: Path) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors(), files=3)
    name = "model-00002-of-00003.safetensors"
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-5])
    assert_refused(tmp_path, name, "not a whole safetensors file")


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:17a5\nsize 1118459450\n")
    assert_refused(tmp_path, name, "a pointer of git-lfs", "run git lfs pull")


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize(
    "place",
    ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.bin", "", 3, None, ".safetensors"],
)
def test_an_index_that_names_other_places(tmp_path: Path, place: Any) -> None:
    write_folder(tmp_path / "model", BAICHUAN, baichuan_tensors(), files=2)
    change_index(tmp_path / "model", lambda index: index["weight_map"].update({NORM: place}))
    assert_refused(tmp_path / "model", INDEX, repr(NORM), "in the same folder")


@pytest.mark.usefixtures("nothing_filled")
def test_an_index_and_its_files_that_do_not_go_together(tmp_path: Path) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors(), files=2)
    first, second = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))
    whole = (tmp_path / INDEX).read_text()
    right = json.loads(whole)["weight_map"][NORM]
    wrong = second if right == first else first
    change_index(tmp_path, lambda index: index["weight_map"].update({NORM: wrong}))
    assert_refused(tmp_path, wrong, f"tensor {NORM!r} is missing", INDEX)
    for change in (lambda index: index["weight_map"].pop(NORM), lambda index: index.update(weight_map={NORM: right})):
        (tmp_path / INDEX).write_text(whole)
        change_index(tmp_path, change)
        assert_refused(tmp_path, right, "has the tensor", INDEX)
    (tmp_path / INDEX).write_text(whole)
    (tmp_path / second).rename(tmp_path / "elsewhere")
    assert_refused(tmp_path, second, "no such file")
    for text, part in (("{}", "weight_map"), ('{"weight_map": {}}', "weight_map"), ("[", "not valid JSON")):
        (tmp_path / INDEX).write_text(text)
        assert_refused(tmp_path, INDEX, part)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_are_not_opened(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, MOSAIC, mosaic_tensors())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"not even a pickle")
    assert_refused(tmp_path, name, f"trainshort convert {tmp_path} --out")


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOOM))
    assert_refused(tmp_path, "", "holds no weights")


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "llama"}, ("model_type 'llama'", "BLOOM", "Jina v2")),
        ({"model_type": ["bloom"]}, ("model_type ['bloom']",)),
        ({}, ("model_type None",)),
        ({"model_type": "bert", "position_embedding_type": "absolute"}, ("model_type 'bert'",)),
        (BAICHUAN | {"num_hidden_layers": 32}, ("rotary", "13B")),
        (BAICHUAN | {"max_position_embeddings": 4096}, ("rotary", "13B")),
        (FALCON | {"alibi": False}, ("alibi must be true", "rotary")),
        ({name: value for name, value in FALCON.items() if name != "alibi"}, ("alibi must be true",)),
        (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, ("parallel_attn must be true",)),
        (FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4}, ("num_kv_heads",)),
        (FALCON | {"activation": "mish"}, ("activation must be one of", "'mish'")),
        (MPT | {"attn_config": {"qk_ln": True}}, ("attn_config.qk_ln", "True")),
        (MPT | {"attn_config": {"alibi": False}}, ("attn_config.alibi must be true", "learned")),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, ("attn_config.attn_type",)),
        (MPT | {"attn_config": {"alibi_bias_max": -1}}, ("attn_config.alibi_bias_max",)),
        (MPT | {"attn_config": {"clip_qkv": "6"}}, ("attn_config.clip_qkv must be a finite number",)),
        (MPT | {"attn_config": [1]}, ("attn_config must be an object",)),
        (MPT | {"ffn_config": {"ffn_type": "mptglu"}}, ("ffn_config.ffn_type", "'mptglu'")),
        (MPT | {"ffn_config": {"ffn_act_fn": {"name": "relu"}}}, ("ffn_config.ffn_act_fn", "relu")),
        (MPT | {"logit_scale": 0.5}, ("logit_scale",)),
        (MPT | {"final_logit_softcapping": 2.0}, ("final_logit_softcapping is not implemented: it must be null",)),
        (MPT | {"block_overrides": {"order": []}}, ("block_overrides is not implemented: it must be null",)),
        (MPT | {"attn_config": {"attn_logit_softcapping": 50}}, ("attn_config.attn_logit_softcapping is not impl",)),
        (MPT | {"expansion_ratio": 0}, ("expansion_ratio must lie in (0, 1,024]",)),
        (MPT | {"expansion_ratio": "4"}, ("expansion_ratio must be a finite number",)),
        (MPT | {"norm_type": "rmsnorm"}, ("norm_type",)),
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, ("apply_residual_connection_post_layernorm",)),
        (BLOOM | {"hidden_size": 47}, ("multiple of num_heads",)),
        (BLOOM | {"hidden_size": 2**62}, ("hidden_size must be a whole number", "16,777,216")),
        (BLOOM | {"vocab_size": 10**400}, ("vocab_size must be a whole number",)),
        (BLOOM | {"n_head": 10**6, "hidden_size": 10**6}, ("n_head must be a whole number from 1 to 4,096",)),
        (BLOOM | {"n_layer": "2"}, ("n_layer must be a whole number", "'2'")),
        (BLOOM | {"n_layer": True}, ("n_layer must be a whole number",)),
        (BLOOM | {"layer_norm_epsilon": float("nan")}, ("layer_norm_epsilon",)),
        ({"model_type": "bloom"}, ("vocab_size is missing",)),
        (JINA | {"feed_forward_type": "original"}, ("feed_forward_type", "'geglu' or 'reglu'")),
        (MOSAIC | {"num_attention_heads": 0}, ("num_attention_heads",)),
    ],
    ids=lambda value: None,
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert_refused(write_folder(tmp_path, config, baichuan_tensors()), "config.json", *parts)


@pytest.mark.usefixtures("nothing_filled")
@pytest.mark.parametrize("config", [BAICHUAN, DNABERT, JINA], ids=["baichuan", "dnabert", "jina"])
@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 10**6), ("vocab_size", 2**24)])
def test_sizes_beyond_the_file(tmp_path: Path, config: dict[str, Any], field: str, value: int) -> None:
    """A model of a million layers is not even built without memory."""
    tensors = {id(BAICHUAN): baichuan_tensors, id(DNABERT): mosaic_tensors, id(JINA): jina_tensors}[id(config)]()
    part = "too few for the 1,000,000 layers" if field == "num_hidden_layers" else "the config wants [16777216, 48]"
    assert_refused(write_folder(tmp_path, config | {field: value}, tensors), "model.safetensors", part)


HOSTILE = {
    "baichuan": (BAICHUAN, baichuan_tensors),
    "mosaic_bert": (MOSAIC, mosaic_tensors),
    "jina_code": (JINA, lambda: jina_tensors(code=True)),
}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configs(tmp_path: Path, name: str, every: int) -> None:
    config, make = HOSTILE[name]
    folder = write_folder(tmp_path, config, make())
    survives(folder / "config.json", lambda: ts.load(folder), home=folder, every=every)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("config", [BLOOM, MPT | {"attn_config": {"alibi": True, "clip_qkv": 6}}, FALCON], ids=str)
def test_hostile_configs_of_native_families(tmp_path: Path, config: dict[str, Any], every: int) -> None:
    """With the weights of another model: what is refused, and how, is all that there is to see."""
    folder = write_folder(tmp_path, config, baichuan_tensors())
    survives(folder / "config.json", lambda: ts.load(folder), home=folder, every=every)


@pytest.mark.parametrize("every", EVERY)
def test_a_hostile_index(tmp_path: Path, every: int) -> None:
    folder = write_folder(tmp_path, BAICHUAN, baichuan_tensors(), files=2)
    survives(folder / INDEX, lambda: ts.load(folder), home=folder, every=every)


def test_a_rotary_model_is_told_by_its_tensors(tmp_path: Path) -> None:
    tensors = baichuan_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_refused(write_folder(tmp_path, BAICHUAN, tensors), "config.json", "rotary")


def test_learned_positions_of_an_mpt_are_refused(tmp_path: Path) -> None:
    """Whatever the config says: there is a tensor that nothing reads."""
    tensors = {"transformer.wte.weight": torch.ones(61, 48), "transformer.wpe.weight": torch.ones(64, 48)}
    for layer in range(2):
        at = f"transformer.blocks.{layer}"
        tensors |= {f"{at}.norm_{each}.weight": torch.ones(48) for each in (1, 2)}
        tensors |= {f"{at}.attn.Wqkv.weight": torch.ones(144, 48), f"{at}.attn.out_proj.weight": torch.ones(48, 48)}
        tensors |= {
            f"{at}.ffn.up_proj.weight": torch.ones(192, 48),
            f"{at}.ffn.down_proj.weight": torch.ones(48, 192),
        }
    tensors["transformer.norm_f.weight"] = torch.ones(48)
    folder = write_folder(tmp_path, MPT, tensors)
    assert_refused(folder, "model.safetensors", "'transformer.wpe.weight' is not in the model")


def test_masks_of_other_shapes(tmp_path: Path) -> None:
    model = ts.load(write_folder(tmp_path / "decoder", BAICHUAN, baichuan_tensors()))
    encoder = ts.load(write_folder(tmp_path / "encoder", MOSAIC, mosaic_tensors()))
    assert isinstance(model, ts.LanguageModel)
    assert isinstance(encoder, ts.Encoder)
    tokens, mask = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    calls: list[Callable[[], Any]] = [
        lambda: model(tokens, key_padding_mask=mask),
        lambda: model(tokens, key_padding_mask=mask, cache=model.make_cache(1)),
        lambda: model.loss(tokens, tokens, key_padding_mask=mask),
        lambda: model.generate(tokens, key_padding_mask=mask, max_new_tokens=2),
        lambda: encoder(tokens, mask),
        lambda: encoder.pool(tokens, mask),
    ]
    said = re.escape("key_padding_mask must be [1, 5] like tokens, got [1, 1, 5, 5]")
    for call in calls:
        with pytest.raises(ValueError, match=said):
            call()


def test_a_broken_tokenizer_is_found_before_the_weights(tmp_path: Path) -> None:
    write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert_refused(tmp_path, "tokenizer.json", "not a tokenizer")


def test_a_sentencepiece_tokenizer_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who needs a text says so, before weights are read."""
    write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b")
    assert ts.load(tmp_path).tokenizer is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    said = run_cli(capsys, "generate", tmp_path, "--prompt", "x").one_sentence()
    assert "the folder has a SentencePiece tokenizer.model only, which is not read" in said
