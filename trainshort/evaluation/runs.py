"""A trained run or a public model, with what it is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshort.common.fields import Fields
from trainshort.common.reading import file_size, read_json
from trainshort.data import TokenData
from trainshort.data.plain import PlainText, plain_text, tokenizer_of
from trainshort.evaluation.about import is_ours, trained_length

MULTIPLES = (1, 2, 4, 8, 16)  # of the trained length


@dataclass(frozen=True)
class OpenedRun:
    folder: Path
    config: dict[str, Any]  # its config.json
    data: TokenData | PlainText

    def usual_lengths(self) -> tuple[int, ...]:
        """1 to 16 times the length it was trained at, as far as the data go."""
        trained = trained_length(self.folder, self.config)
        if trained is None:
            raise ValueError(
                f"{self.folder} does not say at which length it was trained: name some with lengths (--lengths)"
            )
        is_text = isinstance(self.data, PlainText)
        there = len(self.data.tokens if isinstance(self.data, PlainText) else self.data.validation) - 1
        if there < trained:
            raise ValueError(
                f"the {'' if is_text else 'validation '}text has {there + 1:,} tokens, fewer than the trained length "
                f"{trained:,}: name shorter ones with lengths (--lengths), or evaluate on "
                + ("a longer text (--text)" if is_text else "other data (--data)")
            )
        return tuple(trained * multiple for multiple in MULTIPLES if trained * multiple <= there)


def open_run(folder: str | Path, data: str | Path | None = None, text: str | Path | None = None) -> OpenedRun:
    """The run or public model in that folder, and what to test it on.

    That is prepared data, a text file, or else the data that a run was trained on; for a public model, whose data
    nobody has, the embedded text.
    """
    folder = Path(folder)
    if data is not None and text is not None:
        raise ValueError("data (--data) and text (--text) both say what to evaluate on: name one of them")
    config = _config(folder)
    path = folder / "train.json"
    training = read_json(path, "evaluate takes a folder that train wrote") if path.exists() else {}
    if data is None and text is None and is_ours(config):
        if "data" not in training:
            raise ValueError(
                f"{folder} does not say on which data it was trained: name some with data (--data), or a text with "
                "text (--text)"
            )
        data = Fields(training, str(path), "name the data with data (--data)").text("data")
        if not Path(data).is_dir():
            raise FileNotFoundError(
                f"{folder} was trained on {data}, which is not there from here: name it with data (--data)"
            )
    _refuse_encoder(folder, config)
    if data is None:
        return OpenedRun(folder, config, plain_text(text, tokenizer_of(folder)))
    opened = TokenData(data)
    check_tokenizers(folder, Path(data))
    return OpenedRun(folder, config, opened)


def _config(folder: Path) -> dict[str, Any]:
    what = "evaluate takes one that train wrote, or a public model's"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; {what}")
    if not any((folder / name).exists() for name in ("model.safetensors", "config.json")):
        raise FileNotFoundError(f"{folder} holds no trained model (config.json and model.safetensors); {what}")
    config = read_json(folder / "config.json", "a model's folder has a config.json")
    if is_ours(config) and not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder} holds no trained model (model.safetensors): train it first")
    return config


def _refuse_encoder(folder: Path, config: dict[str, Any]) -> None:
    if is_ours(config):
        encoder = config.get("kind") == "Encoder"
    else:  # imported here: torch is not needed to find out what is wrong with a run
        from trainshort.models.checkpoints.public import is_encoder

        encoder = is_encoder(config)
    if encoder:
        raise ValueError(
            f"{folder} holds an encoder, which sees both sides of a token: perplexity and recall need a language "
            "model"
        )


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
