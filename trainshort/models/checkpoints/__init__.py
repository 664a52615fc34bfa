"""Models from folders: `load` reads config.json and leaves the rest to the format it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainshort.common.reading import read_json
from trainshort.common.tokenizer_json import read_tokenizer
from trainshort.models.checkpoints import native, public
from trainshort.models.checkpoints.native import save as save
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    position_options: Mapping[str, Any] | None = None,
) -> LanguageModel | Encoder:
    """A model from its folder, in evaluation mode, with `.tokenizer` if the folder has a tokenizer.json.

    The folder is one that `save` wrote, or a public ALiBi model (see public.py). dtype: None keeps that of the file.

    position_options: some that are to be other than saved, such as {"scaling": "linear", "factor": 4.0}.
    """
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
