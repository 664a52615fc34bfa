"""Models from and to folders: `load` and `save` find the format, and leave the rest to its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainshort.common.reading import read_json
from trainshort.common.tokenizer_json import read_tokenizer
from trainshort.models.checkpoints import native, public
from trainshort.models.checkpoints.export import save_bloom
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel

FORMATS: dict[str, Callable[[LanguageModel | Encoder, str | Path], None]] = {
    "trainshort": native.save,
    "bloom": save_bloom,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def save(model: LanguageModel | Encoder, folder: str | Path, *, format: str = "trainshort") -> None:
    """Write a model to a folder, with its tokenizer if it has one.

    Every file is there whole or not at all.

    Args:
        model: A LanguageModel or an Encoder.
        folder: Where to; it is made.
        format: "trainshort", our own, which takes every model and replaces one that is there; or "bloom", a new
            folder that transformers loads, for models of BLOOM's shape. A model of another shape is refused with all
            that differs.

    Example:
        >>> ts.save(model, "my-model")
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    kind = type(model).__name__
    if kind not in native.KINDS:
        raise TypeError(f"save takes a LanguageModel or an Encoder, got {kind}")
    FORMATS[format](model, folder)


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    position_options: Mapping[str, Any] | None = None,
) -> LanguageModel | Encoder:
    """A model from its folder, in evaluation mode, with `.tokenizer` if the folder has a tokenizer.json.

    Nothing is unpickled, no code of the folder is run, and everything is checked before memory is taken.

    Args:
        folder: One that `save` wrote, or a public ALiBi model.
        dtype: None keeps that of the file.
        device: None: torch's default.
        position_options: Some that are to be other than saved, such as `{"scaling": "linear", "factor": 4.0}`.

    Returns:
        A LanguageModel or an Encoder.

    Example:
        >>> ts.save(model, "my-model")
        >>> ts.load("my-model", dtype=torch.bfloat16).config == model.config
        True
    """
    if dtype not in (None, *DTYPES):
        allowed = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype must be one of {allowed}, or None for that of the file; got {dtype!r}")
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; load takes the folder that holds config.json")
    config = read_json(path, "load takes the folder that holds config.json")
    file = folder / "tokenizer.json"
    tokenizer = read_tokenizer(file) if file.exists() else None
    reader = native if native.is_native(config) else public
    model = reader.load(folder, config, dtype, device, position_options or {})
    model.tokenizer = tokenizer
    return model.eval()
