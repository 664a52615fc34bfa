"""Models from and to folders: `load` and `save` find the format, and leave the rest to its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainshort.common.reading import read_json
from trainshort.common.tokenizer_json import read_tokenizer
from trainshort.models.checkpoints import native, public
from trainshort.models.checkpoints.export import save_bloom
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel
from trainshort.models.model import Model
from trainshort.models.transformers_arguments import LOAD, instead_of

Wanted = TypeVar("Wanted", bound=Model)
FORMATS: dict[str, Callable[[LanguageModel | Encoder, str | Path], None]] = {
    "trainshort": native.save,
    "bloom": save_bloom,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def save(model: Model, folder: str | Path, *, format: str = "trainshort") -> None:
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
    if not isinstance(model, LanguageModel | Encoder) or type(model).__name__ not in native.KINDS:
        raise TypeError(f"save takes a LanguageModel or an Encoder, got {type(model).__name__}")
    FORMATS[format](model, folder)


@instead_of(LOAD)
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
        dtype: None keeps that of the file. Where the tensors of a public model differ in it, as norms do in some,
            None means for all of them the one that its config names, or else one that holds all of theirs.
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
    config = _read_config(folder)
    file = folder / "tokenizer.json"
    tokenizer = read_tokenizer(file) if file.exists() else None
    reader = native if native.is_native(config) else public
    model = reader.load(folder, config, dtype, device, position_options or {})
    model.tokenizer = tokenizer
    return model.eval()


def load_class(
    wanted: type[Wanted],
    folder: str | Path,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    position_options: Mapping[str, Any] | None,
) -> Wanted:
    """`load` for `from_pretrained` of a class: a folder that holds another is refused before its weights are read."""
    name = wanted.__name__
    if wanted not in native.KINDS.values():
        raise TypeError(
            f"ts.LanguageModel and ts.Encoder have from_pretrained, their subclasses have not; got {name}: build it "
            "yourself and pass it what ts.load(folder).state_dict() gives"
        )
    config = _read_config(Path(folder))
    held = config.get("kind") if native.is_native(config) else public.kind_of(config)
    other = {"LanguageModel": "a language model", "Encoder": "an encoder"}.get(str(held))
    if other is not None and held != name:
        raise ValueError(
            f"{folder} holds {other}: load it with ts.{held}.from_pretrained, or with ts.load, which takes both"
        )
    model = load(folder, dtype, device, position_options=position_options)
    assert isinstance(model, wanted)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    wanted = "load takes the folder that holds config.json"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such folder; {wanted}, and downloads nothing: download a model of a hub to a folder "
            "first (hf download OWNER/NAME --local-dir FOLDER)"
        )
    return read_json(folder / "config.json", wanted)
