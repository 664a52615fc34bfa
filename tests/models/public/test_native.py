"""BLOOM, MPT and Falcon folders that transformers wrote: the logits and the texts of transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import in_pieces, left_padded, random_tokens

pytest.importorskip("transformers")

from tests.models.public.native import MODELS, VOCABULARY, bloom, falcon, mpt

pytestmark = pytest.mark.transformers
SHORT, LONG = 50, 300  # tokens: MPT's configs here say 64


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ts.LanguageModel]:
    """A model of transformers, and ours from its folder."""
    theirs = MODELS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, loaded(folder)


def loaded(folder: Path, **options: Any) -> ts.LanguageModel:
    model = ts.load(folder, **options)
    assert isinstance(model, ts.LanguageModel)
    assert not model.training
    return model


def their_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """A float mask keeps Falcon from rounding its positions, and MPT refuses texts beyond its length."""
    if hasattr(model.config, "max_seq_len"):
        model.config.max_seq_len = max(64, tokens.shape[1])
    mask = torch.ones(tokens.shape) if mask is None else mask.float()
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=False).logits


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    """Up to the rounding of float32 in a few layers."""
    assert float(expected.std()) > 0.3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


def test_hidden_states(pair: tuple[Any, ts.LanguageModel]) -> None:
    """One for the embeddings and one for each layer, the last after the final norm."""
    theirs, ours = pair
    tokens = random_tokens(2, SHORT, vocabulary=VOCABULARY)
    with torch.no_grad():
        mask = torch.ones(tokens.shape)
        expected = theirs(tokens, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
        found = ours.hidden_states(tokens)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("length", [1, SHORT, LONG])
def test_logits(pair: tuple[Any, ts.LanguageModel], length: int) -> None:
    theirs, ours = pair
    tokens = random_tokens(2, length, vocabulary=VOCABULARY)
    with torch.no_grad():
        assert_same_logits(ours(tokens), their_logits(theirs, tokens))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_logits_of_padded_rows(pair: tuple[Any, ts.LanguageModel], side: str, length: int) -> None:
    theirs, ours = pair
    tokens, mask = left_padded([random_tokens(1, part, seed=part)[0] for part in (length, length // 3)], filler=7)
    if side == "right":
        tokens, mask = tokens.flip(1), mask.flip(1)
    with torch.no_grad():
        found, expected = ours(tokens, key_padding_mask=mask), their_logits(theirs, tokens, mask)
    assert_same_logits(found[mask], expected[mask])


@pytest.mark.parametrize("sizes", [[1] * 5 + [45], [128, 1, 171]], ids=["short", "long"])
def test_logits_with_a_cache(pair: tuple[Any, ts.LanguageModel], sizes: list[int]) -> None:
    theirs, ours = pair
    tokens = random_tokens(2, sum(sizes), vocabulary=VOCABULARY)
    assert_same_logits(in_pieces(ours, tokens, sizes, ours.make_cache(2)), their_logits(theirs, tokens))


@pytest.mark.parametrize("use_cache", [True, False])
def test_generated_tokens(pair: tuple[Any, ts.LanguageModel], use_cache: bool) -> None:
    theirs, ours = pair
    tokens, mask = left_padded([random_tokens(1, part, seed=part)[0] for part in (20, 9)])
    if hasattr(theirs.config, "max_seq_len"):
        theirs.config.max_seq_len = 64
    expected = theirs.generate(
        tokens, attention_mask=mask.float(), max_new_tokens=24, do_sample=False, use_cache=use_cache
    )
    found = ours.generate(tokens, key_padding_mask=mask, max_new_tokens=24, temperature=0.0, use_cache=use_cache)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bloom-6", "mpt-6", "falcon-6-grouped"])
def test_several_files_are_the_same_model(tmp_path: Path, name: str) -> None:
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one, many = loaded(tmp_path / "one").state_dict(), loaded(tmp_path / "many").state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[each], many[each]) for each in one)


def rename(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in safetensors.torch.load(path.read_bytes()).items()}
    safetensors.torch.save_file(tensors, path)


def change_config(folder: Path, **changes: Any) -> None:
    """None takes a field away."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_an_old_bloom_without_prefix_and_with_old_names(tmp_path: Path) -> None:
    theirs = bloom(6)
    theirs.save_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.removeprefix("transformer."))
    change_config(
        tmp_path, hidden_size=None, n_embed=48, n_head=None, num_attention_heads=6, seq_length=2048, offset_alibi=100
    )
    tokens = random_tokens(1, SHORT)
    with torch.no_grad():
        assert_same_logits(loaded(tmp_path)(tokens), their_logits(theirs, tokens))


def test_an_old_falcon_rw(tmp_path: Path) -> None:
    """Files from before transformers had the model: other names, and other defaults."""
    theirs = MODELS["falcon-6-like_rw"]()
    theirs.save_pretrained(tmp_path)
    change_config(
        tmp_path,
        model_type="RefinedWebModel",
        architectures=["RWForCausalLM"],
        n_head=6,
        num_attention_heads=None,
        n_layer=2,
        num_hidden_layers=None,
        parallel_attn=None,
        multi_query=None,
    )
    tokens = random_tokens(1, SHORT)
    with torch.no_grad():
        assert_same_logits(loaded(tmp_path)(tokens), their_logits(theirs, tokens))


def test_the_slopes_of_falcon_can_be_the_papers(tmp_path: Path) -> None:
    falcon(12, multi_query=False).save_pretrained(tmp_path)
    rounded = loaded(tmp_path).position.slopes * 8**0.5
    exact = loaded(tmp_path, position_options={"slopes": None}).position.slopes * 8**0.5
    torch.testing.assert_close(exact, ts.alibi_slopes(12))
    torch.testing.assert_close(rounded, ts.alibi_slopes(12).bfloat16().float())
    assert not torch.equal(exact, rounded)


@pytest.mark.parametrize("most", [16, 4.0])
def test_alibi_bias_max(tmp_path: Path, most: float) -> None:
    """transformers ignores it; the formula, for 6 heads: the first four, then every other one of eight."""
    mpt(6).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["attn_config"].update({"alibi_bias_max": most, "clip_qkv": 6})
    path.write_text(json.dumps(config))
    model = loaded(tmp_path)
    expected = [2 ** (-most * k / 4) for k in (1, 2, 3, 4)] + [2 ** (-most * k / 8) for k in (1, 3)]
    torch.testing.assert_close(model.position.slopes, torch.tensor(expected))
    assert model.config.clip_qkv == 6


def test_the_original_names_of_an_mpt(tmp_path: Path) -> None:
    """Its own code calls the epsilon of norms norm_eps, and takes fractions as the ratio of widths."""
    theirs = mpt(6, layer_norm_epsilon=0.1)
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, layer_norm_epsilon=None, norm_eps=0.1, expansion_ratio=4.01)
    tokens, model = random_tokens(1, SHORT, vocabulary=VOCABULARY), loaded(tmp_path)
    assert model.config.d_ff == 192
    with torch.no_grad():
        assert_same_logits(model(tokens), their_logits(theirs, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """As stored unless asked for; slopes are float32 always."""
    theirs = bloom(6).half()
    theirs.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in loaded(tmp_path).parameters()} == {torch.float16}
    model = loaded(tmp_path, dtype=dtype)
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert model.position.slopes.dtype == torch.float32
    assert torch.equal(model.head.weight, theirs.lm_head.weight.to(dtype))
    assert model.head.weight is model.trunk.embedding.weight


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": None}, torch.float32),
    ],
    ids=str,
)
def test_stored_dtypes_that_differ(tmp_path: Path, named: dict[str, Any], wanted: torch.dtype) -> None:
    """16-bit matrices, float32 norms and biases: a model of one dtype, which runs."""
    theirs = bloom(6)
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, **named)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    mixed = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(mixed, path)
    model, tokens = loaded(tmp_path), random_tokens(1, SHORT, vocabulary=VOCABULARY)
    assert {tensor.dtype for tensor in model.parameters()} == {wanted}
    expected = loaded(tmp_path, dtype=wanted)(tokens)
    assert torch.equal(model(tokens), expected)
    assert {tensor.dtype for tensor in loaded(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    theirs = bloom(6)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    twice = tensors | {"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}
    safetensors.torch.save_file(twice, path)
    assert torch.equal(loaded(tmp_path).head.weight, theirs.lm_head.weight)
    for tensor in (twice["lm_head.weight"], twice["transformer.word_embeddings.weight"]):
        tensor[5, 6] = math.nan  # of a run that diverged: the same all the same
    safetensors.torch.save_file(twice, path)
    assert bool(loaded(tmp_path).head.weight[5, 6].isnan())
    twice["lm_head.weight"][3, 4] += 1
    safetensors.torch.save_file(twice, path)
    said = r"model\.safetensors: tensor 'lm_head.weight' is not the same as .*set tie_word_embeddings to false"
    with pytest.raises(ValueError, match=said):
        ts.load(tmp_path)


def test_it_can_be_saved_as_ours_and_trained(tmp_path: Path) -> None:
    bloom(6).save_pretrained(tmp_path / "theirs")
    model = loaded(tmp_path / "theirs")
    ts.save(model, tmp_path / "ours")
    again, tokens = loaded(tmp_path / "ours"), random_tokens(2, SHORT)
    assert torch.equal(again(tokens), model(tokens))
    model.train().loss(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    mpt(6).save_pretrained(tmp_path / "model")
    mark = tmp_path / "run"
    for name in ("modeling_mpt.py", "configuration_mpt.py", "__init__.py"):
        (tmp_path / "model" / name).write_text(f"open({str(mark)!r}, 'w')\n")
    change_config(tmp_path / "model", auto_map={"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"})
    loaded(tmp_path / "model")
    assert not mark.exists()
    shutil.rmtree(tmp_path / "model")
