"""Where the figures of a model go, and what is written with them where its own files lie elsewhere.

A run of ours keeps its figures itself. The folder of a public model is left as it was downloaded, unless somebody
asks: its figures have a folder of their own, which says of which model they are. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainshort.common.checks import is_whole
from trainshort.common.fields import Fields
from trainshort.common.files import sha256
from trainshort.common.reading import read_json
from trainshort.evaluation.recall_records import NAME as RECALL
from trainshort.evaluation.recall_records import read_records as read_recall
from trainshort.evaluation.records import NAME, Record, fingerprint, read_records

FOLDER = "evaluations"  # in which models that are no runs of ours have their figures, by name
# What configs call the length that a model was trained at, or made for.
LENGTHS = ("seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the format that `save` writes."""
    return config.get("format") == "trainshort"


def configured_length(config: Mapping[str, Any]) -> int | None:
    """The length that a public model's config.json names, if it does."""
    return next((int(config[name]) for name in LENGTHS if is_whole(config.get(name), 1)), None)


def trained_length(folder: Path, config: Mapping[str, Any]) -> int | None:
    """As a run's train.json says, or the config.json of a public model; None where neither does."""
    path = folder / "train.json"
    if not path.exists():
        return None if is_ours(config) else configured_length(config)
    training = read_json(path, "evaluate takes a folder that train wrote")
    if "length" not in training:
        return None
    return Fields(training, str(path), "name some with lengths (--lengths)").whole("length", 1)


def weights_of(folder: Path) -> str:
    """A fingerprint of the weights in a folder, which may be one file or several and their index."""
    if (folder / SINGLE).exists():
        return fingerprint(folder / SINGLE)
    places = read_json(folder / INDEX, "an index says which tensor lies in which file").get("weight_map")
    files = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    digests = "".join(f"{name} {sha256(folder / Path(name).name)}\n" for name in files)
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def with_options(text: str, options: Mapping[str, Any]) -> str:
    """A name for a model, or for its weights, that computes positions with other options than it was saved with."""
    return "-".join([text, *(f"{name}={value}" for name, value in sorted(options.items()))])


def about_model(
    folder: Path,
    config: Mapping[str, Any],
    length: int | None,
    weights: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Record:
    """What a report shows of a model, from its own files. config: of our model, as ModelConfig.to_dict gives it.

    length: that it was trained at, where that is known. weights: their fingerprint. options: of its position method,
    that are other than saved.
    """
    known = {} if weights is None else {"weights": weights}
    name = with_options(folder.resolve().name, options)
    return {"name": name, "folder": str(folder), **known, "length": length, "model": dict(config)}


def place_for(
    folder: Path,
    config: Mapping[str, Any],
    out: str | Path | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """The folder for a model's figures: as asked for, else a run's own or evaluations/NAME. options: as above."""
    if out is None and is_ours(config) and not options:
        place = folder
    else:
        place = Path(FOLDER) / with_options(folder.resolve().name, options) if out is None else Path(out)
    if place.resolve() != folder.resolve():
        check_place(place, NAME, RECALL)
    elif options:
        raise ValueError(
            f"{folder} keeps the figures of the model as it was saved, and these are with other options of its "
            "positions: name another folder for them with out (--out)"
        )
    elif not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: cannot be written to; name another folder for the figures with out (--out)")
    return place


def check_place(place: Path, *names: str) -> None:
    """Refuse a folder that holds things but none of these files, before anything is measured."""
    above = next(each for each in (place, *place.absolute().parents) if each.exists())
    if not above.is_dir():
        raise FileExistsError(f"{above} is a file: out (--out) names a folder")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{above}: cannot be written to; name another folder with out (--out)")
    found = sorted(each.name for each in place.iterdir()) if above == place else []
    if found and not any(name in found for name in names):
        listed = ", ".join(found[:3]) + (" and more" if len(found) > 3 else "")
        raise FileExistsError(
            f"{place} is there already and holds other things ({listed}), but no {names[0]}: name a new folder with "
            "out (--out)"
        )


def check_same_model(place: Path, weights: str) -> None:
    """Refuse to put figures of one model to those of another."""
    for name, read in ((NAME, read_records), (RECALL, read_recall)):
        path = place / name
        if not path.exists():
            continue
        about = read_json(path, "remove it and evaluate again").get("about")
        told = about.get("weights") if isinstance(about, dict) else None
        if {told, *(record.get("model") for record in read(place))} - {weights, None}:
            whose = f", those of {about.get('folder')}" if isinstance(about, dict) else ""
            raise FileExistsError(
                f"{path} holds figures of other weights{whose}: name another folder with out (--out), or remove it"
            )
