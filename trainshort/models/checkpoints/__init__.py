"""Models from folders: `load` reads config.json and leaves the rest to the format it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from trainshort.models.checkpoints import native
from trainshort.models.checkpoints.native import save as save
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> LanguageModel | Encoder:
    """A model from its folder, in evaluation mode, with `.tokenizer` if the folder has a tokenizer.json."""
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; load takes the folder that holds config.json")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; load takes the folder that holds config.json")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict) or not native.is_native(config):
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise ValueError(f"{path}: not a format this trainshort reads (model_type {kind!r})")
    model = native.load(folder, config, dtype, device)
    model.tokenizer = _tokenizer(folder / "tokenizer.json")
    return model.eval()


def _tokenizer(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RuntimeError(f"{path} needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
