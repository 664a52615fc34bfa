"""Our own format: config.json, model.safetensors and, where there is one, tokenizer.json, in one folder.

All files are written beside their names and then moved into place, so that a folder never holds half a model. The
config says whether the tokenizer was saved with it: such a tokenizer goes when the model is replaced by one without,
while one that somebody else laid into the folder stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainshort.common.files import partial_path, push_to_disk
from trainshort.common.reading import read_json
from trainshort.models.checkpoints.weights import check_fits, fill, save_weights, take_dtypes, weights_of
from trainshort.models.config import ModelConfig
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel
from trainshort.positions import is_known
from trainshort.positions.imported import how_to_import, origin_of

FORMAT = "trainshort"
VERSION = 1
KINDS: dict[str, Callable[[ModelConfig], nn.Module]] = {"LanguageModel": LanguageModel, "Encoder": Encoder}


def is_native(config: dict[str, Any]) -> bool:
    return config.get("format") == FORMAT


def save(model: LanguageModel | Encoder, folder: str | Path, *, weights: bool = True) -> None:
    """Write a model to a folder, which is made if it is not there. weights=False: its config and tokenizer alone."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": type(model).__name__,
        "tokenizer": model.tokenizer is not None,
        "model": model.config.to_dict(),
    }
    if (origin := origin_of(model.config.position)) is not None:
        header["position_origin"] = origin  # for people to read: nothing is ever imported because of it
    stale = model.tokenizer is None and _holds_our_tokenizer(folder)
    writers: dict[str, Callable[[Path], Any]] = {}
    if weights:
        tensors = weights_of(model)
        writers["model.safetensors"] = lambda path: save_weights(tensors, path)
    writers["config.json"] = lambda path: path.write_text(json.dumps(header, indent=2) + "\n")
    if model.tokenizer is not None:
        writers["tokenizer.json"] = lambda path: path.write_text(model.tokenizer.to_str())
    partial = {name: partial_path(folder / name) for name in writers}
    try:
        for name, write in writers.items():
            write(partial[name])
            push_to_disk(partial[name])
        for name, path in partial.items():
            if name == "config.json" and stale:  # before the config that no longer knows of it
                (folder / "tokenizer.json").unlink(missing_ok=True)
            os.replace(path, folder / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _holds_our_tokenizer(folder: Path) -> bool:
    """Whether the folder's tokenizer.json was saved with a model, and so goes with it."""
    try:
        header = read_json(folder / "config.json", "")
    except (OSError, ValueError):
        return False
    # The first saves did not say: for them a tokenizer is taken to be theirs.
    return is_native(header) and header.get("tokenizer") is not False


def load(
    folder: Path,
    header: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    position_options: Mapping[str, Any],
) -> LanguageModel | Encoder:
    """Read a model from a folder whose config.json is `header`, with these options of its position method changed."""
    where = folder / "config.json"
    if header.get("version") != VERSION:
        raise ValueError(f"{where}: version {header.get('version')!r} is not one this trainshort reads ({VERSION})")
    if header.get("kind") not in list(KINDS):
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}; got {header.get('kind')!r}")
    if "model" not in header:
        raise ValueError(f"{where}: model, the shape of the model, is missing")
    check_position(where, header)
    build, weights = KINDS[header["kind"]], folder / "model.safetensors"
    try:
        config = ModelConfig.from_dict(header["model"])
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    if position_options:
        config = replace(config, position_options={**config.position_options, **position_options})
    check_fits(build, config, weights, str(where))
    model: Any = build(config)
    take_dtypes(model, weights)
    fill(model, weights)
    return model.to(dtype=dtype, device=device)


def check_position(path: Path, header: dict[str, Any]) -> None:
    """Refuse a model whose position method is not known here, and say where it came from."""
    model = header.get("model")
    name = model.get("position") if isinstance(model, dict) else None
    origin = header.get("position_origin")
    if isinstance(name, str) and origin is not None and not is_known(name):
        raise ValueError(f"{path}: the position method {name[:100]!r} is not known here; {how_to_import(origin)}")
