"""Pickled folders to safetensors: the same model, by a process that allows tensors only, whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.cli.run_cli import run_cli
from tests.models.public.folders import (
    BAICHUAN,
    DNABERT,
    Tensors,
    baichuan_tensors,
    mosaic_tensors,
    write_folder,
)
from tests.models.small import random_tokens
from trainshort.models.checkpoints.convert import convert
from trainshort.models.checkpoints.unpickle import convert_file

Capture = pytest.CaptureFixture[str]


def pickled(folder: Path, config: dict[str, Any], tensors: Any, files: int = 1, **options: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bert_layers.py").write_text("raise RuntimeError('run')\n")
    (folder / "tokenizer_config.json").write_text("{}")
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return folder
    places = {}
    for part in range(files):
        file, mine = f"pytorch_model-{part + 1:05}-of-{files:05}.bin", sorted(tensors)[part::files]
        torch.save({name: tensors[name] for name in mine}, folder / file, **options)
        places |= dict.fromkeys(mine, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def tied_tensors() -> Tensors:
    """With the word embeddings under a second name, as pickles have them."""
    tensors = mosaic_tensors()
    return tensors | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"]}


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "old"])
def test_one_file(tmp_path: Path, capsys: Capture, options: dict[str, Any]) -> None:
    folder = pickled(tmp_path / "old", DNABERT, tied_tensors(), **options)
    with pytest.raises(ValueError, match="trainshort convert"):
        ts.load(folder)
    outcome = run_cli(capsys, "convert", folder, "--out", tmp_path / "new")
    assert outcome.status == 0, outcome.error
    assert f"pytorch_model.bin -> model.safetensors: {len(tied_tensors())} tensors" in outcome.out
    assert "1 of them stored a second time" in outcome.out
    assert "copied: config.json, tokenizer_config.json" in outcome.out
    assert "left out: bert_layers.py" in outcome.out
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert len(set(modes.values())) == 1  # safetensors by itself writes for the owner alone
    assert sorted(modes) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    direct = ts.load(write_folder(tmp_path / "direct", DNABERT, mosaic_tensors()))
    tokens = random_tokens(1, 30)
    assert torch.equal(ts.load(tmp_path / "new")(tokens), direct(tokens))


@pytest.mark.slow
def test_several_files(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in baichuan_tensors().items()}
    folder = pickled(tmp_path / "old", BAICHUAN, tensors, files=3)
    done = convert(folder, tmp_path / "made" / "new")
    assert [file.target for file in done.files] == [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    direct = ts.load(write_folder(tmp_path / "direct", BAICHUAN, tensors)).state_dict()
    found = ts.load(tmp_path / "made" / "new").state_dict()
    assert all(torch.equal(found[name], direct[name]) for name in direct)
    assert found["head.weight"].dtype == torch.bfloat16


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_to_run_something(tmp_path: Path, capsys: Capture, zipped: bool) -> None:
    mark = tmp_path / "it ran"
    folder = pickled(tmp_path / "old", DNABERT, {"weight": Attack(mark)}, _use_new_zipfile_serialization=zipped)
    outcome = run_cli(capsys, "convert", folder, "--out", tmp_path / "new")
    assert "cannot be read as weights and nothing else (UnpicklingError: " in outcome.one_sentence()
    assert "GLOBAL posix.mkdir" in outcome.error
    assert "torch.load" not in outcome.error  # how to read it all the same
    assert str(folder / "pytorch_model.bin") in outcome.error
    assert not mark.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists()  # so the attack was one


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ([torch.ones(2)], "holds list"),
        ({"state_dict": {"weight": torch.ones(2)}}, "holds dict as 'state_dict'"),
        ({"weight": 3}, "holds int as 'weight'"),
        ({3: torch.ones(2)}, "as '3'"),
        ({}, "holds dict"),
    ],
    ids=str,
)
def test_other_contents(tmp_path: Path, content: Any, part: str) -> None:
    folder = pickled(tmp_path / "old", DNABERT, content)
    with pytest.raises(ValueError, match=part):
        convert_file(str(folder / "pytorch_model.bin"), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_pickle_of_more_than_tensors_is_told_what_it_holds(tmp_path: Path, capsys: Capture) -> None:
    folder = pickled(tmp_path / "old", DNABERT, {"module": torch.nn.Linear(2, 2)})
    said = run_cli(capsys, "convert", folder, "--out", tmp_path / "new").one_sentence()
    assert "nothing else (UnpicklingError: Unsupported global: GLOBAL torch.nn.modules.linear.Linear was not" in said


def test_a_pointer_of_git_lfs(tmp_path: Path, capsys: Capture) -> None:
    folder = pickled(tmp_path / "old", DNABERT, {})
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:17a5\nsize 3\n")
    said = run_cli(capsys, "convert", folder, "--out", tmp_path / "new").one_sentence()
    assert f"{folder / 'pytorch_model.bin'}: a pointer of git-lfs" in said
    assert "git lfs pull" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps({"a": 1})[:-1]], ids=["empty", "text", "cut"])
def test_damaged_files(tmp_path: Path, capsys: Capture, content: bytes) -> None:
    folder = pickled(tmp_path / "old", DNABERT, {})
    (folder / "pytorch_model.bin").write_bytes(content)
    outcome = run_cli(capsys, "convert", folder, "--out", tmp_path / "new")
    assert "pytorch_model.bin: cannot be read as weights" in outcome.one_sentence()
    assert not (tmp_path / "new").exists()


def test_places_that_are_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = pickled(tmp_path / "old", DNABERT, tied_tensors())

    def refused(*words: object) -> str:
        return run_cli(capsys, "convert", *words).one_sentence()

    assert "no such folder" in refused(tmp_path / "nowhere", "--out", tmp_path / "new")
    assert "is there already; the folder to write must not be there yet" in refused(folder, "--out", folder)
    (folder / "pytorch_model.bin").unlink()
    assert "nothing to convert" in refused(folder, "--out", tmp_path / "new")
    index = folder / "pytorch_model.bin.index.json"
    for place, part in (("../x.bin", "same folder"), ("x.bin", "no such file"), ("x.py", "same folder")):
        index.write_text(json.dumps({"weight_map": {"weight": place}}))
        assert part in refused(folder, "--out", tmp_path / "new")
    write_folder(tmp_path / "done", DNABERT, mosaic_tensors())
    assert "has model.safetensors already" in refused(tmp_path / "done", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_generate_says_why_there_is_no_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    folder = write_folder(tmp_path, BAICHUAN, baichuan_tensors())
    (folder / "tokenizer.model").write_bytes(b"\x0a")
    error = run_cli(capsys, "generate", folder, "--prompt", "a", "--device", "cpu").one_sentence()
    assert "SentencePiece tokenizer.model only" in error
