"""Models of ours as BLOOM folders: transformers and `load` say what the model said; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.cli.run_cli import run_cli
from tests.models.saved import tiny_tokenizer
from tests.models.small import encoder, language_model, random_tokens
from tests.models.test_interrupted_save import Interrupted, fail_at
from trainshort.data.tokenizer import ByteTokenizer
from trainshort.models.checkpoints.bloom import SHAPE
from trainshort.training.recipes import RECIPES

pytest.importorskip("transformers")

import transformers

from tests.models.public.native import bloom

pytestmark = pytest.mark.transformers
Capture = pytest.CaptureFixture[str]


def bloom_like(**changes: Any) -> ts.LanguageModel:
    return language_model(**(SHAPE | {"num_heads": 6, "d_model": 48} | changes))


def in_transformers(folder: Path) -> Any:
    """The model that transformers reads, with every tensor of the file and no other."""
    model, about = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, transformers.BloomForCausalLM)
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_same_logits(found: Any, expected: Any) -> None:
    assert float(expected.std()) > 0.3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [6, 8, 1])
def test_the_logits_of_transformers(tmp_path: Path, heads: int, tied: bool) -> None:
    model = bloom_like(num_heads=heads, d_model=8 * heads, tie_embeddings=tied, norm_eps=1e-4)
    ts.save(model, tmp_path / "out", format="bloom")
    tokens = random_tokens(2, 200)
    with torch.no_grad():
        assert_same_logits(in_transformers(tmp_path / "out")(tokens).logits, model(tokens))
        assert torch.equal(ts.load(tmp_path / "out")(tokens), model(tokens))


def test_a_public_model_goes_and_comes_back(tmp_path: Path) -> None:
    theirs = bloom(11)
    theirs.save_pretrained(tmp_path / "theirs")
    ts.save(ts.load(tmp_path / "theirs"), tmp_path / "ours", format="bloom")
    found = in_transformers(tmp_path / "ours")
    assert found.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_stays(tmp_path: Path, dtype: torch.dtype) -> None:
    ts.save(bloom_like(dtype=dtype), tmp_path, format="bloom")
    assert {each.dtype for each in in_transformers(tmp_path).parameters()} == {dtype}
    assert {each.dtype for each in ts.load(tmp_path).parameters()} == {dtype}


def test_the_tokenizer_and_the_end_of_texts(tmp_path: Path) -> None:
    """transformers stops where our tokenizer ends texts, and not at token 2, as a BLOOM without a word would."""
    model = bloom_like(vocab_size=257)
    model.tokenizer = tokenizer_of(ByteTokenizer().to_str())
    ts.save(model, tmp_path / "bytes", format="bloom")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "bytes")
    text = "Zwölf Kämpfer, 12 words;\n\n  and spaces"
    assert found.encode(text) == model.tokenizer.encode(text).ids
    assert found.decode(found.encode(text)) == text
    assert (found.eos_token_id, found.bos_token_id) == (256, None)
    theirs = in_transformers(tmp_path / "bytes")
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id) == (256, None)
    tokens = random_tokens(1, 30)
    expected = model.generate(tokens, max_new_tokens=20, temperature=0.0, stop_tokens=(256,))
    assert torch.equal(theirs.generate(tokens, max_new_tokens=20, do_sample=False), expected)
    assert ts.load(tmp_path / "bytes").tokenizer.to_str() == model.tokenizer.to_str()
    named = tiny_tokenizer("<s> </s> <pad> <unk>")
    model.tokenizer = named
    ts.save(model, tmp_path / "named", format="bloom")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 3]
    model.tokenizer = None
    ts.save(model, tmp_path / "none", format="bloom")
    assert sorted(path.name for path in (tmp_path / "none").iterdir()) == ["config.json", "model.safetensors"]
    assert in_transformers(tmp_path / "none").generation_config.eos_token_id is None


def tokenizer_of(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"embedding_norm": False}, ["embedding_norm is False, BLOOM has True"]),
        (
            {"activation": "silu", "gated": True, "ffn_bias": False},
            [
                "activation is 'silu', BLOOM has 'gelu_tanh'",
                "gated is True, BLOOM has False",
                "ffn_bias is False, BLOOM has True",
            ],
        ),
        ({"position": "rotary"}, ["position is 'rotary', BLOOM has 'alibi'"]),
        ({"position_options": {"rotary": True}}, ["position_options['rotary'] is True, BLOOM has False"]),
        (
            {"position_options": {"scaling": "linear", "factor": 2.0}},
            ["position_options['scaling'] is 'linear'", "slopes are "],
        ),
        ({"position_options": {"slopes": [0.1] * 6}}, ["slopes are 0.1, 0.1, 0.1, 0.1, ..., BLOOM has the paper's"]),
        ({"position_options": {"trainable": True}}, ["slopes are "]),  # they were changed
        ({"position_options": {"scale": 0.5}}, ["slopes are "]),
        ({"position_options": {"biased_heads": 3}}, ["slopes are "]),
        ({"num_kv_heads": 2, "d_ff": 100}, ["num_kv_heads is 2, BLOOM has 6", "d_ff is 100, BLOOM has 192"]),
        ({"head_dim": 16}, ["head_dim is 16, BLOOM has 8"]),
        ({"attention_scale": 0.5}, ["attention_scale is 0.5, BLOOM has 0.353553"]),
        ({"norm": "rmsnorm", "head_bias": True}, ["norm is 'rmsnorm'", "head_bias is True"]),
        ({"norm_place": "post"}, ["norm_place is 'post'"]),
        ({"clip_qkv": 6.0, "qk_norm": True}, ["clip_qkv is 6.0, BLOOM has None", "qk_norm is True"]),
        ({"parallel_residual": True, "final_norm": False}, ["parallel_residual is True", "final_norm is False"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_all_of_it(
    tmp_path: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    model = bloom_like(**changes)
    with pytest.raises(ValueError, match="does not fit BLOOM's shape: ") as caught:
        ts.save(model, tmp_path / "out", format="bloom")
    text = str(caught.value)
    assert all(part in text for part in parts)
    assert text.count(", BLOOM has ") == len(parts)
    assert not list(tmp_path.iterdir())


def test_encoders_formats_and_mixed_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="causal is False, BLOOM has True"):
        ts.save(encoder(**SHAPE), tmp_path / "out", format="bloom")
    with pytest.raises(ValueError, match="format must be one of trainshort, bloom; got 'gguf'"):
        ts.save(bloom_like(), tmp_path / "out", format="gguf")
    with pytest.raises(TypeError, match="save takes a LanguageModel or an Encoder, got Linear"):
        ts.save(torch.nn.Linear(2, 2), tmp_path / "out", format="bloom")  # type: ignore[arg-type]
    model = bloom_like()
    model.trunk.blocks[0].half()
    with pytest.raises(ValueError, match=r"weights are torch.float16 and torch.float32, BLOOM has one dtype"):
        ts.save(model, tmp_path / "out", format="bloom")
    assert not list(tmp_path.iterdir())


def test_what_says_nothing_about_the_shape_is_no_obstacle(tmp_path: Path) -> None:
    """Slopes of the paper by another way, dropout, fields of other methods."""
    slopes = ts.alibi_slopes(6).tolist()
    for index, changes in enumerate(
        (
            {"position_options": {"slopes": slopes}, "d_ff": 192, "num_kv_heads": 6, "head_dim": 8},
            {"dropout": 0.1, "attention_dropout": 0.2, "masked_head": False, "max_length": 99},
        )
    ):
        ts.save(bloom_like(**changes), tmp_path / str(index), format="bloom")
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    assert (config["hidden_dropout"], config["attention_dropout"]) == (0.1, 0.2)
    fresh = ts.LanguageModel(bloom_like(position_options={"trainable": True}).config)  # not trained yet
    ts.save(fresh, tmp_path / "trainable", format="bloom")
    in_transformers(tmp_path / "trainable")


@pytest.mark.parametrize("error", [OSError, Interrupted])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_failing_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    model = bloom_like()
    model.tokenizer = tiny_tokenizer()
    with monkeypatch.context() as patch:
        fail_at(patch, name, error)
        with pytest.raises(error, match="no space left"):
            ts.save(model, tmp_path / "out", format="bloom")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    ts.save(bloom_like(), tmp_path / "out", format="bloom")  # empty: fine
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(
        FileExistsError, match="is there already; the folder to write must not be there yet, or be empty"
    ):
        ts.save(bloom_like(seed=2), tmp_path / "out", format="bloom")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file: is there already"):
        ts.save(bloom_like(), tmp_path / "file", format="bloom")


def test_the_recipe_and_the_command(tmp_path: Path, capsys: Capture) -> None:
    """A model of the recipe's shape is written; others are refused in one sentence, and with the way to one."""
    fields = RECIPES["bloom-560m"]() | {"num_layers": 2, "d_model": 32, "num_heads": 4, "vocab_size": 61}
    model = ts.LanguageModel(ts.ModelConfig(**fields))
    ts.save(model, tmp_path / "run")
    outcome = run_cli(capsys, "convert", tmp_path / "run", "--out", tmp_path / "out", "--to", "bloom")
    assert outcome.status == 0, outcome.error
    assert "BloomForCausalLM" in outcome.out
    in_transformers(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    ts.save(language_model(), tmp_path / "other")
    outcome = run_cli(capsys, "convert", tmp_path / "other", "--out", tmp_path / "out", "--to", "bloom")
    assert outcome.status == 1
    assert "embedding_norm is False, BLOOM has True" in outcome.error
    assert "--model bloom-560m" in outcome.error
    assert not (tmp_path / "out").exists()
