"""A text that each model continues, beyond its training length too, beside its run: what perplexities sound like."""

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
from trainshort.models.prompts import stops_at

NAME = "samples.json"
PROMPT, NEW, MOST = 48, 240, 1024  # tokens


def write_samples(folder: Path, data: TokenData, trained: int) -> None:
    """Let the model continue the beginning of the validation text, unless these weights have done so already.

    trained: the training length. The text goes on beyond it where that is not too far, and
    `within_trained_length` says how many characters the model wrote before.
    """
    about = {"weights": fingerprint(folder / "model.safetensors"), "trained": trained}
    if _about(folder / NAME) == about:
        return
    model = load(folder, device=device_for(None))
    assert isinstance(model, LanguageModel)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    limit = model.position.max_length or PROMPT + MOST
    prompt = [int(token) for token in data.validation[: min(PROMPT, limit // 2)]]
    new = min(max(NEW, min(trained + NEW // 2, MOST) - len(prompt)), limit - len(prompt))
    tokens = torch.tensor([prompt], dtype=torch.int64, device=next(model.parameters()).device)
    stop = stops_at(tokenizer.end_id, model.config.vocab_size)
    out = model.generate(tokens, max_new_tokens=new, temperature=0.8, top_p=0.95, seed=0, stop_tokens=stop)
    continued = [token for token in out[0, len(prompt) :].tolist() if token not in stop]
    text = tokenizer.decode(continued)
    inside = tokenizer.decode(continued[: max(0, trained - len(prompt))])
    sample = {"prompt": tokenizer.decode(prompt), "text": text, "within_trained_length": len(inside)}
    write_json(folder / NAME, about | {"samples": [sample]})


def _about(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, "compare writes it")
    except (OSError, ValueError):
        return {}
    return {name: found.get(name) for name in ("weights", "trained")}
