"""A trained run with the data that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.common.fields import Fields
from trainshort.common.reading import file_size, read_json
from trainshort.data import TokenData

MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length


@dataclass(frozen=True)
class OpenedRun:
    folder: Path
    training: dict[str, Any]  # its train.json; empty for a model that came from elsewhere
    data: TokenData
    split: str = "validation"

    def usual_lengths(self) -> tuple[int, ...]:
        """1 to 16 times the length it was trained at, as far as the data go."""
        if "length" not in self.training:
            raise ValueError(
                f"{self.folder} does not say at which length it was trained: name some with lengths (--lengths)"
            )
        advice = "name some with lengths (--lengths)"
        trained = Fields(self.training, str(self.folder / "train.json"), advice).whole("length", 1)
        there = len(self.data.validation) - 1
        if there < trained:
            raise ValueError(
                f"the validation text has {there + 1:,} tokens, fewer than the trained length {trained:,}: "
                "name shorter ones with lengths (--lengths), or evaluate on other data (--data)"
            )
        return tuple(trained * multiple for multiple in MULTIPLES if trained * multiple <= there)


def open_run(folder: str | Path, data: str | Path | None = None) -> OpenedRun:
    """The run in that folder, and the data it was trained on unless others are named."""
    folder = Path(folder)
    if not (folder / "model.safetensors").exists():
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; evaluate takes one that train wrote")
        raise FileNotFoundError(f"{folder} holds no trained model (model.safetensors): train it first")
    path = folder / "train.json"
    training = read_json(path, "evaluate takes a folder that train wrote") if path.exists() else {}
    if data is None:
        if "data" not in training:
            raise ValueError(f"{folder} does not say on which data it was trained: name some with data (--data)")
        data = Fields(training, str(path), "name the data with data (--data)").text("data")
        if not Path(data).is_dir():
            raise FileNotFoundError(
                f"{folder} was trained on {data}, which is not there from here: name it with data (--data)"
            )
    opened = TokenData(data)
    check_tokenizers(folder, Path(data))
    return OpenedRun(folder, training, opened)


def check_tokenizers(run: Path, data: Path) -> None:
    """Refuse data whose tokens mean something else than the model's."""
    ours, theirs = run / "tokenizer.json", data / "tokenizer.json"
    both = ours.exists() and theirs.exists()
    if both and (_size(ours) != _size(theirs) or ours.read_bytes() != theirs.read_bytes()):
        raise ValueError(
            f"{data} was prepared with another tokenizer than {run} was trained with: "
            f"prepare it again with tokenizer (--tokenizer) {ours}"
        )


def _size(path: Path) -> int:
    return file_size(path, "a tokenizer is a tokenizer.json")
