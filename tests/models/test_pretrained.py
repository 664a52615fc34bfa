"""from_pretrained and save_pretrained: ts.load and ts.save, under the names that transformers has for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainshort as ts
from tests.models.public.folders import JINA, MOSAIC, jina_tensors, mosaic_tensors, write_folder
from tests.models.saved import assert_same_model, tiny_tokenizer
from tests.models.small import encoder, language_model


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
