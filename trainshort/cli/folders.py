"""The folder of one model that a command is given: not that of a comparison, which holds many."""

from __future__ import annotations

from pathlib import Path


def check_one_model(folder: str) -> None:
    """Refuse a folder that is no model's and has models in it, such as what `compare` leaves."""
    place = Path(folder)
    if not place.is_dir() or (place / "config.json").exists():
        return
    inside = sorted(each.parent for each in place.glob("*/config.json"))
    if inside:
        models = f"a folder of {len(inside)} models" if len(inside) > 1 else "a folder with a model in it"
        raise ValueError(f"{folder} is {models}, not a model: name one of them, such as {inside[0]}")
