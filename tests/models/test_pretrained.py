"""from_pretrained and save_pretrained: ts.load and ts.save, under the names that transformers has for them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.models.public.folders import JINA, MOSAIC, jina_tensors, mosaic_tensors, write_folder
from tests.models.saved import assert_same_model, tiny_tokenizer
from tests.models.small import encoder, language_model, random_tokens
from trainshort.models import transformers_arguments as answers


def test_there_and_back(tmp_path: Path) -> None:
    saved, other = language_model(), encoder()
    saved.tokenizer = tiny_tokenizer()
    saved.save_pretrained(tmp_path / "model")
    other.save_pretrained(str(tmp_path / "encoder"))
    found = ts.LanguageModel.from_pretrained(str(tmp_path / "model"))
    assert_same_model(found, saved)
    assert not found.training
    assert found.tokenizer.to_str() == saved.tokenizer.to_str()
    assert_same_model(ts.Encoder.from_pretrained(tmp_path / "encoder"), other)


def test_options_are_those_of_load_and_save(tmp_path: Path) -> None:
    language_model().save_pretrained(tmp_path)
    options = {"scaling": "linear", "factor": 4.0}
    found = ts.LanguageModel.from_pretrained(tmp_path, torch.float64, "cpu", position_options=options)
    assert found.head.weight.dtype == torch.float64
    assert found.config.position_options == options
    with pytest.raises(ValueError, match="format must be one of trainshort, bloom; got 'gguf'"):
        found.save_pretrained(tmp_path, format="gguf")


def test_a_folder_of_the_other_kind(tmp_path: Path) -> None:
    language_model().save_pretrained(tmp_path / "model")
    encoder().save_pretrained(tmp_path / "encoder")
    for folder in tmp_path.iterdir():
        (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"model holds a language model: load it with ts\.LanguageModel\.from_pretr"):
        ts.Encoder.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"encoder holds an encoder: load it with ts\.Encoder\.from_pretrained"):
        ts.LanguageModel.from_pretrained(tmp_path / "encoder")


def test_public_encoders(tmp_path: Path) -> None:
    for name, config, tensors in (("mosaic", MOSAIC, mosaic_tensors()), ("jina", JINA, jina_tensors())):
        folder = write_folder(tmp_path / name, config, tensors)
        assert isinstance(ts.Encoder.from_pretrained(folder), ts.Encoder)
        with pytest.raises(ValueError, match="holds an encoder"):
            ts.LanguageModel.from_pretrained(folder)


def test_a_family_that_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for kind in (ts.LanguageModel, ts.Encoder):
        with pytest.raises(ValueError, match=r"not a format this trainshort reads \(model_type 'llama'\)"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bigscience/bloom-560m", "gpt2", "no/such/folder"])
def test_names_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name}: no such folder.*downloads nothing: download .* a folder"):
        ts.LanguageModel.from_pretrained(name)


def test_classes_of_your_own(tmp_path: Path) -> None:
    class Mine(ts.LanguageModel):
        pass

    language_model().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="subclasses have not; got Mine"):
        Mine.from_pretrained(tmp_path)


# Arguments of transformers that are none of ours


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"do_sample": True}, "do_sample is an argument of transformers; here temperature=0 is greedy"),
        ({"max_length": 15}, "max_length .* max_new_tokens, which does not count the prompt"),
        ({"attention_mask": None}, "attention_mask .* key_padding_mask, bool"),
        ({"tokens": None, "input_ids": None}, "input_ids .* tokens, the first argument"),
    ],
    ids=str,
)
def test_generate_names_its_own_argument(options: dict[str, Any], match: str) -> None:
    given = {"tokens": random_tokens(1, 4), "max_new_tokens": 3} | options
    if given["tokens"] is None:
        del given["tokens"]
    with pytest.raises(TypeError, match=match):
        language_model().generate(**given)


def test_a_call_of_a_model_names_its_own_argument() -> None:
    tokens = random_tokens(1, 4)
    for model in (language_model(), encoder()):
        with pytest.raises(TypeError, match=r"output_hidden_states .* model\.hidden_states\(tokens\)"):
            model(tokens, output_hidden_states=True)
        with pytest.raises(TypeError, match=r"labels .* model\.loss\(tokens, targets\)"):
            model(tokens, labels=tokens)
    with pytest.raises(TypeError, match=r"token_type_ids .* token_types"):
        encoder()(tokens, token_type_ids=tokens)


@pytest.mark.parametrize("load", [ts.load, ts.LanguageModel.from_pretrained])
def test_loading_names_its_own_argument(load: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"torch_dtype .* pass dtype"):
        load(tmp_path, torch_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"device_map .* pass device"):
        load(tmp_path, device_map="auto")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtypes'"):
        load(tmp_path, dtypes=None)


def test_no_argument_of_ours_is_refused() -> None:
    calls: list[tuple[Callable[..., Any], dict[str, str]]] = [
        (ts.LanguageModel.forward, answers.LANGUAGE_MODEL),
        (ts.LanguageModel.generate, answers.GENERATE),
        (ts.Encoder.forward, answers.ENCODER),
        (ts.load, answers.LOAD),
        (ts.Encoder.from_pretrained, answers.LOAD),
    ]
    for call, table in calls:
        parameters = inspect.signature(call).parameters
        assert not set(parameters) & set(table)
        assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
