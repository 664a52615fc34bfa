"""A text that each model continues, beside its run: what perplexities sound like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainshort.common.devices import device_for
from trainshort.common.files import write_json
from trainshort.common.reading import read_json
from trainshort.data import TokenData, load_tokenizer
from trainshort.evaluation.records import fingerprint
from trainshort.models import LanguageModel, load

NAME = "samples.json"
PROMPT, NEW = 48, 240  # tokens


def write_samples(folder: Path, data: TokenData) -> None:
    """Let the model continue the beginning of the validation text, unless these weights have done so already."""
    weights = fingerprint(folder / "model.safetensors")
    if _weights_of(folder / NAME) == weights:
        return
    model = load(folder, device=device_for(None))
    assert isinstance(model, LanguageModel)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    limit = model.position.max_length or PROMPT + NEW
    prompt = [int(token) for token in data.validation[: min(PROMPT, limit // 2)]]
    new = min(NEW, limit - len(prompt))
    tokens = torch.tensor([prompt], dtype=torch.int64, device=next(model.parameters()).device)
    stop = [] if tokenizer.end_id is None else [tokenizer.end_id]
    out = model.generate(tokens, max_new_tokens=new, temperature=0.8, top_p=0.95, seed=0, stop_tokens=stop)
    continued = [token for token in out[0, len(prompt) :].tolist() if token not in stop]
    sample = {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(continued)}
    write_json(folder / NAME, {"weights": weights, "samples": [sample]})


def _weights_of(path: Path) -> Any:
    try:
        return read_json(path, "compare writes it").get("weights")
    except (OSError, ValueError):
        return None
