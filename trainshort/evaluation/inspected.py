"""The folder of a model and a text, inspected: with what a page needs to know of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainshort
from trainshort.common.devices import device_for
from trainshort.common.reading import read_json
from trainshort.data.plain import EMBEDDED_NAME, embedded_text, read_plain, tokenizer_of, with_special_tokens
from trainshort.data.tokenizer import Tokenizer
from trainshort.evaluation.about import about_model, trained_length
from trainshort.evaluation.inspect_config import InspectConfig
from trainshort.evaluation.inspection import inspect
from trainshort.models import load

CHARACTERS = 16  # of a text that is read for each token wanted: hardly any tokenizer makes longer ones
LOOKS = 12  # heads of which the farthest look is shown
AROUND = 20  # characters that are shown up to it


def inspect_folder(
    folder: str | Path,
    text: str | Path | None,
    config: InspectConfig,
    *,
    on_layer: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """What `inspect` finds of the model in that folder, on a text file or on the embedded text."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; inspect takes a run, or the folder of a public model")
    header = read_json(folder / "config.json", "a model's folder has a config.json")
    tokenizer = tokenizer_of(folder)
    content = embedded_text() if text is None else read_plain(Path(text))
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    model = load(folder, dtype=dtype, device=device_for(config.device))
    most = min(config.most_tokens, model.position.max_length or config.most_tokens)
    beginning = content[: CHARACTERS * most]
    encoder = not model.config.causal
    tokens = with_special_tokens(tokenizer, beginning, most) if encoder else tokenizer.encode(beginning)[:most]
    if tokens and max(tokens) >= model.config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} makes token {max(tokens)}, the model's vocabulary ends at "
            f"{model.config.vocab_size - 1}: this is not the model's tokenizer"
        )
    found = inspect(model, tokens, config, on_layer=on_layer)
    length = trained_length(folder, header)
    return found | {
        "trainshort": trainshort.__version__,
        "about": about_model(folder, model.config.to_dict(), length),
        "text": {"name": EMBEDDED_NAME if text is None else str(text), "tokens": len(tokens)},
        "looks": farthest_looks(found, tokens, tokenizer),
    }


def farthest_looks(found: dict[str, Any], tokens: list[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Of the heads that need far tokens most, on average, the query that looks farthest, with the text around."""
    heads = found["heads"]
    places = [(layer, head) for layer, row in enumerate(heads["needed"]) for head in range(len(row))]
    places.sort(key=lambda place: -heads["needed"][place[0]][place[1]])
    looks = []
    for layer, head in places[:LOOKS]:
        query, key = (int(heads[name][layer][head]) for name in ("query", "key"))
        looks.append(
            {
                "layer": layer,
                "head": head,
                "needed": heads["needed"][layer][head],
                "distance": heads["most_needed"][layer][head],
                "query": query,
                "key": key,
                "query_text": tokenizer.decode(tokens[max(0, query - AROUND) : query + 1])[-AROUND:],
                "key_text": tokenizer.decode(tokens[max(0, key - AROUND) : key + 1])[-AROUND:],
            }
        )
    return looks
