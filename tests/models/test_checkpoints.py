"""Saving and loading: what comes back is what was saved, bit for bit, and a broken folder says what is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import trainshort as ts
from tests.models.saved import Model, assert_same_model, tiny_tokenizer
from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens

FILES = ["config.json", "model.safetensors"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a saved model."""
    ts.save(language_model(qkv_bias=True), tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    change(tensors)
    safetensors.torch.save_file(tensors, path)


# There and back


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", [language_model, encoder])
def test_round_trip(tmp_path: Path, kind: Callable[..., Model], position: str) -> None:
    model = kind(position)
    ts.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    found = ts.load(tmp_path)
    assert_same_model(found, model)
    assert not found.training
    assert found.tokenizer is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": True, "head_bias": True},
        {"position_options": {"trainable": True}},
        {"position_options": {"slopes": [0.5, 0.3, 0.2, 0.1]}},
        {"norm": "rmsnorm", "gated": True, "num_kv_heads": 2, "token_types": 2, "embedding_norm": True},
    ],
    ids=str,
)
def test_round_trip_of_variants(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = language_model(**changes)
    ts.save(model, tmp_path)
    assert_same_model(ts.load(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_of_other_precisions(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without a dtype asked for, the model has the one it was saved in: nothing is lost on the way."""
    model = language_model(dtype=dtype)
    ts.save(model, tmp_path)
    assert_same_model(ts.load(tmp_path), model)


def mixed_model(**changes: Any) -> ts.LanguageModel:
    """Weights in bfloat16, norms in float32, a head in float64: each where it matters."""
    model = language_model(norm="rmsnorm", **changes).bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    model.head.double()
    return model


@pytest.mark.parametrize("changes", [{}, {"position_options": {"trainable": True}}], ids=["fixed", "trainable"])
def test_round_trip_of_mixed_precisions(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each tensor comes back in its own dtype, bit for bit."""
    model = mixed_model(**changes)
    before = model.state_dict()
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32, torch.float64}
    ts.save(model, tmp_path)
    after = ts.load(tmp_path).state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def test_tied_weights_of_mixed_precisions_stay_tied(tmp_path: Path) -> None:
    model = language_model(tie_embeddings=True).bfloat16()
    model.trunk.final_norm.float()
    ts.save(model, tmp_path)
    found = ts.load(tmp_path)
    assert found.head.weight is found.trunk.embedding.weight
    assert found.head.weight.dtype == torch.bfloat16
    assert found.trunk.final_norm.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_dtype_asked_for_converts_everything_but_slopes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = mixed_model(position_options={"trainable": True})
    ts.save(model, tmp_path)
    for name, tensor in ts.load(tmp_path, dtype=dtype).state_dict().items():
        saved = model.state_dict()[name]
        wanted = torch.float32 if name.endswith("log_slopes") else dtype
        assert tensor.dtype == wanted, name
        assert torch.equal(tensor, saved.to(wanted)), name


def test_slopes_that_were_saved_in_16_bits_are_float32_again(tmp_path: Path) -> None:
    """As the first versions saved them."""
    model = language_model(position_options={"trainable": True}).bfloat16()
    ts.save(model, tmp_path)
    rounded = model.state_dict()["position.log_slopes"].bfloat16()
    change_tensors(tmp_path, lambda tensors: tensors.update({"position.log_slopes": rounded}))
    found = ts.load(tmp_path)
    assert found.position.log_slopes.dtype == torch.float32
    assert torch.equal(found.position.log_slopes, rounded.float())


def test_training_goes_on_after_loading(tmp_path: Path) -> None:
    ts.save(language_model(tie_embeddings=True), tmp_path)
    model = ts.load(tmp_path)
    assert isinstance(model, ts.LanguageModel)
    assert model.head.weight is model.trunk.embedding.weight
    tokens = random_tokens(2, 20)
    model.loss(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_path_may_be_text_and_folders_are_made(tmp_path: Path) -> None:
    model = language_model()
    ts.save(model, str(tmp_path / "a" / "b"))
    assert_same_model(ts.load(str(tmp_path / "a" / "b")), model)


def test_saving_again_replaces(tmp_path: Path) -> None:
    ts.save(language_model(seed=1), tmp_path)
    second = encoder(d_model=16)
    ts.save(second, tmp_path)
    assert_same_model(ts.load(tmp_path), second)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_shared_tensors_are_stored_once(tmp_path: Path, position: str) -> None:
    model = language_model(position, tie_embeddings=True)
    ts.save(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())
    assert [name for name, tensor in tensors.items() if tensor.shape == (61, 32)] == ["trunk.embedding.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_dtype_may_be_asked_for(folder: Path, dtype: torch.dtype) -> None:
    model, saved = ts.load(folder, dtype=dtype), ts.load(folder)
    for name, tensor in saved.state_dict().items():
        assert model.state_dict()[name].dtype == dtype
        assert torch.equal(model.state_dict()[name], tensor.to(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.float32, .*or None.*; got"):
        ts.load(folder, dtype=dtype)


def test_a_device_may_be_asked_for(folder: Path) -> None:
    assert all(parameter.device.type == "cpu" for parameter in ts.load(folder, device="cpu").parameters())
    model = ts.load(folder, device=torch.device("meta"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_files_are_plain(folder: Path) -> None:
    """JSON and safetensors: nothing that could be unpickled."""
    header = json.loads((folder / "config.json").read_text())
    assert header["format"] == "trainshort"
    assert header["version"] == 1
    assert header["kind"] == "LanguageModel"
    assert ts.ModelConfig.from_dict(header["model"]) == ts.load(folder).config


# The tokenizer


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    model = language_model()
    model.tokenizer = tiny_tokenizer()
    ts.save(model, tmp_path)
    found = ts.load(tmp_path)
    assert found.tokenizer.encode("train long nowhere").ids == [1, 4, 0]
    assert found.tokenizer.to_str() == model.tokenizer.to_str()


def test_a_tokenizer_that_cuts_and_pads_does_neither(folder: Path) -> None:
    """The lengths of somebody's training are no limit of the model's."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = ts.load(folder)
    assert found.tokenizer.encode("train long train short").ids == [1, 4, 1, 2]
    assert found.tokenizer.encode("test").ids == [3]
    ts.save(found, folder)
    assert ts.load(folder).tokenizer.to_str() == tiny_tokenizer().to_str()


def test_a_tokenizer_laid_into_the_folder_is_loaded(folder: Path) -> None:
    tiny_tokenizer("some other words").save(str(folder / "tokenizer.json"))
    assert ts.load(folder).tokenizer.encode("words").ids == [3]


def test_the_tokenizer_of_a_replaced_model_goes_with_it(tmp_path: Path) -> None:
    first, second = language_model(seed=1), language_model(seed=2)
    first.tokenizer = tiny_tokenizer()
    ts.save(first, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*FILES, "tokenizer.json"]
    ts.save(second, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert ts.load(tmp_path).tokenizer is None
    assert_same_model(ts.load(tmp_path), second)


def test_so_does_one_saved_before_the_config_spoke_of_it(tmp_path: Path) -> None:
    model = language_model()
    model.tokenizer = tiny_tokenizer()
    ts.save(model, tmp_path)
    change_config(tmp_path, lambda header: header.pop("tokenizer"))
    ts.save(language_model(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_saving_leaves_alone_what_is_not_ours(tmp_path: Path) -> None:
    """Also a tokenizer.json: trained beforehand, or laid beside a model, it is nobody else's to delete."""
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "notes.txt").write_text("mine")
    for seed in range(3):
        ts.save(language_model(seed=seed), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*FILES, "notes.txt", "tokenizer.json"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert ts.load(tmp_path).tokenizer.to_str() == tiny_tokenizer().to_str()


def test_a_tokenizer_beside_another_library_s_model_is_left_alone(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ts.save(language_model(), tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_file_that_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        ts.load(folder)


# Broken folders


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder"):
        ts.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}: no such file"):
        ts.load(folder)


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises((FileNotFoundError, NotADirectoryError), match=r"config\.json"):
        ts.load(folder / "config.json")


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b'{"format": "trainshort"', b"\xff\xfe\x00"], ids=str)
def test_a_config_that_is_no_json(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        ts.load(folder)


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null", "{}", '{"model_type": "llama"}'])
def test_json_of_another_kind(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"config\.json: (not a format this trainshort reads|holds .*, not a JSON ob)"
    ):
        ts.load(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h.update(version=2), r"config\.json: version 2 is not one this trainshort reads"),
        (lambda h: h.pop("version"), r"config\.json: version None is not one"),
        (lambda h: h.update(kind="Decoder"), r"config\.json: kind must be one of .*; got 'Decoder'"),
        (lambda h: h.pop("kind"), r"config\.json: kind must be one of .*; got None"),
        (lambda h: h.update(kind=["LanguageModel"]), r"config\.json: kind must be one of"),
        (lambda h: h.pop("model"), r"config\.json: .*model"),
        (lambda h: h.update(model=3), r"config\.json: "),
        (
            lambda h: h["model"].update(num_layer=3),
            r"config\.json: .*no field 'num_layer'; did you mean 'num_layers'\?",
        ),
        (lambda h: h["model"].update(position="alibbi"), r"config\.json: .*did you mean 'alibi'\?"),
        (lambda h: h["model"].update(num_heads=5), r"config\.json: .*num_heads"),
        (lambda h: h["model"].update(causal=False), r"config\.json: .*causal"),
    ],
)
def test_a_config_that_cannot_be(folder: Path, change: Callable[[dict[str, Any]], Any], match: str) -> None:
    change_config(folder, change)
    with pytest.raises(ValueError, match=match):
        ts.load(folder)


@pytest.mark.parametrize("keep", [0, 4, 7, 100, -1, -1000])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        ts.load(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda t: t.pop("trunk.blocks.1.attention.qkv.bias"),
            r"model\.safetensors: tensor 'trunk\.blocks\.1\.attention\.qkv\.bias' is missing",
        ),
        (
            lambda t: t.update(surprise=torch.zeros(3)),
            r"model\.safetensors: tensor 'surprise' is not in the model",
        ),
        (
            lambda t: t.update({"trunk.blocks.0.ffn.up.weight": torch.zeros(32, 128)}),
            r"model\.safetensors: tensor 'trunk\.blocks\.0\.ffn\.up\.weight' is \[32, 128\], .* wants \[128, 32\]",
        ),
        (
            lambda t: t.update({"trunk.final_norm.weight": torch.zeros(1)}),
            r"model\.safetensors: tensor 'trunk\.final_norm\.weight' is \[1\], .* wants \[32\]",
        ),
        (lambda t: t.clear(), r"model\.safetensors: has 0 tensors, too few for the 2 layers of the config"),
    ],
    ids=["missing", "extra", "transposed", "broadcastable", "empty"],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable[[dict], Any], match: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=match):
        ts.load(folder)


def test_only_models_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a LanguageModel or an Encoder, got Linear"):
        ts.save(torch.nn.Linear(2, 2), tmp_path / "new")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "new").exists()


def test_saved_files_are_readable_to_others(tmp_path: Path) -> None:
    """As far as the umask allows: safetensors alone would leave its file to the owner."""
    ts.save(language_model(), tmp_path)
    probe = tmp_path / "probe"
    probe.touch()
    assert {(tmp_path / name).stat().st_mode for name in FILES} == {probe.stat().st_mode}


def test_options_of_the_position_method_may_be_others(tmp_path: Path) -> None:
    """A model that was trained on short texts, for longer ones."""
    model, tokens = language_model(position_options={"scale": 0.5}), random_tokens(1, 50)
    ts.save(model, tmp_path)
    stretched = ts.load(tmp_path, position_options={"scaling": "linear", "factor": 4.0})
    assert stretched.config.position_options == {"scale": 0.5, "scaling": "linear", "factor": 4.0}
    expected = ts.load(tmp_path, position_options={"scale": 0.125})
    torch.testing.assert_close(stretched(tokens), expected(tokens))
    with pytest.raises(ValueError, match="scaling must be one of"):
        ts.load(tmp_path, position_options={"scaling": "cubic", "factor": 4.0})
