"""Public ALiBi models: which family a config belongs to, and the model of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainshort.common.messages import shown
from trainshort.models.checkpoints import baichuan, bloom, falcon, jina, mosaic_bert, mpt
from trainshort.models.checkpoints.fields import Fields
from trainshort.models.checkpoints.layout import load_layout, without_prefix
from trainshort.models.checkpoints.shards import find_weights
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel

# Each has PREFIX, is_family and layout.
FAMILIES: dict[str, ModuleType] = {
    "BLOOM": bloom,
    "MPT": mpt,
    "Falcon": falcon,
    "Baichuan-13B": baichuan,
    "MosaicBERT": mosaic_bert,
    "Jina v2": jina,
}
ENCODERS = (mosaic_bert, jina)


def is_encoder(config: Mapping[str, Any]) -> bool:
    return any(family.is_family(config) for family in ENCODERS)


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The class of the model that a config describes; None where it is of no family."""
    if not any(family.is_family(config) for family in FAMILIES.values()):
        return None
    return "Encoder" if is_encoder(config) else "LanguageModel"


def load(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    position_options: Mapping[str, Any],
) -> LanguageModel | Encoder:
    """Read a model from a folder whose config.json is `config`. Code that lies in the folder is never run."""
    where = folder / "config.json"
    fields = Fields(config, where)
    family = next((each for each in FAMILIES.values() if each.is_family(config)), None)
    if family is None:
        kind = shown(config.get("model_type"))
        raise ValueError(
            f"{where}: not a format this trainshort reads (model_type {kind}); it reads its own and the ALiBi models "
            f"{', '.join(FAMILIES)}"
        )
    weights = without_prefix(find_weights(folder), family.PREFIX)
    try:
        layout = family.layout(fields, weights.tensors.keys())
    except ValueError as error:  # of a ModelConfig, which knows no file
        raise error if str(error).startswith(str(where)) else ValueError(f"{where}: {error}") from error
    return load_layout(layout, weights, fields, dtype=dtype, device=device, position_options=position_options)
