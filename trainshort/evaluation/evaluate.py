"""A model's perplexity at a list of lengths, with what it cost, on the same tokens at every length."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from trainshort.common.devices import device_for
from trainshort.common.machine import Waiting
from trainshort.common.reading import read_json
from trainshort.data.plain import PlainText
from trainshort.evaluation.about import (
    about_model,
    check_same_model,
    is_ours,
    trained_length,
    weights_of,
    with_options,
)
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.kept import kept_keys
from trainshort.evaluation.memory import peak_memory
from trainshort.evaluation.records import Record, add_record, figures, position_edges
from trainshort.evaluation.score import losses
from trainshort.evaluation.windows import scored_span, windows
from trainshort.models import LanguageModel, load
from trainshort.ops.context import state

Progress = Callable[[int, int, int], None]  # length, newly scored tokens, all that will be
WARM_UP = 256  # tokens, before anything is timed
HASHED_AT_ONCE = 2**20  # tokens


class Data(Protocol):
    """What evaluation needs of a prepared text: trainshort.data.TokenData is one."""

    @property
    def train(self) -> np.ndarray[Any, Any]: ...
    @property
    def validation(self) -> np.ndarray[Any, Any]: ...
    def words_of(self, split: str, start: int, end: int) -> int: ...
    def bytes_of(self, split: str, start: int, end: int) -> int: ...


@dataclass(frozen=True)
class Text:
    """The tokens of one split, and what is known of them."""

    tokens: np.ndarray[Any, Any]
    source: Data | PlainText | None
    split: str

    @property
    def tokenizer(self) -> str | None:
        """Of a text that other models make other tokens of."""
        return self.source.tokenizer_identity if isinstance(self.source, PlainText) else None

    @cached_property
    def identity(self) -> str:
        """A name for exactly these data: their own, or one made of the tokens."""
        named = getattr(self.source, "identity", None)
        if named is not None:
            return str(named)
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), HASHED_AT_ONCE):
            digest.update(np.asarray(self.tokens[start : start + HASHED_AT_ONCE]).astype("<i8").tobytes())
        return f"tokens {digest.hexdigest()}"

    @property
    def folder(self) -> str | None:
        """Where they came from, for people to read."""
        folder = getattr(self.source, "folder", None)
        return None if folder is None else str(folder)

    def counts(self, first: int, last: int) -> tuple[int | None, int | None]:
        """Words and bytes of the tokens that the places [first, last) predict."""
        if self.source is None:
            return None, None
        between = (self.split, first + 1, last + 1)
        return self.source.words_of(*between), self.source.bytes_of(*between)


@dataclass(frozen=True)
class Destination:
    """The folder whose file records are put into, the weights they are of, and what is said there of the model."""

    folder: Path
    weights: str
    about: Record | None


def evaluate(
    model: LanguageModel | str | Path,
    data: Data | PlainText | np.ndarray[Any, Any],
    config: EvaluateConfig,
    *,
    out: str | Path | None = None,
    position_options: Mapping[str, Any] = MappingProxyType({}),
    on_scored: Progress | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """One record for each length. With a run's folder, each is also put into its evaluation.json at once, where
    records of other data, windows, tokens, weights and dtypes stay.

    data: TokenData, a PlainText, which is scored to its end, or an array of tokens, of which words and bytes are then
    not known. out: the folder for evaluation.json; None: a run's own, and of a public model nothing is written.
    position_options: of a model in a folder, some that are to be other than saved, such as {"scaling": "yarn"}. A
    scaling with neither a factor nor a trained_length takes the length that the run was trained at. on_scored and
    on_record are told of progress. Inside `ts.context_parallel` the ranks share each window, and the first one
    writes the file.
    """
    if not config.lengths:
        raise ValueError("lengths must name at least one length to evaluate at")
    text = text_of(data, config.split)
    first, last = scored_span(
        len(text.tokens), config.lengths, limit=config.tokens, lead=config.lead, to_the_end=text.tokenizer is not None
    )
    network, destination = opened_model(model, config.dtype, config.device, out, position_options)
    check_vocabulary(text, network, first, last + 1)
    training, dense = network.training, network.trunk.dense
    network.eval()
    network.attend_densely(config.attention == "dense")
    records = []
    try:
        _warm_up(network, text, config)
        for length in config.lengths:
            record = _at_length(network, text, config, length, (first, last), on_scored)
            if destination is not None:
                record = {"model": destination.weights} | record
                if state.current is None or state.current.rank == 0:
                    add_record(destination.folder, record, destination.weights, destination.about)
            records.append(record)
            if on_record is not None:
                on_record(record)
    finally:
        network.train(training)
        network.attend_densely(dense)
    return records


def opened_model(
    model: LanguageModel | str | Path,
    dtype: str | None,
    device: str | None,
    out: str | Path | None,
    position_options: Mapping[str, Any],
) -> tuple[LanguageModel, Destination | None]:
    """The model, and where its figures go, if anywhere."""
    if isinstance(model, (str, Path)):
        options = _with_trained_length(Path(model), position_options)
        network = loaded(model, dtype, device, options)
        return network, destination_of(Path(model), network, out, options)
    if position_options:
        raise ValueError("position_options are for a model in a folder: load this one with them")
    return model, None


def _with_trained_length(folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if "scaling" not in options or "factor" in options or "trained_length" in options:
        return options
    length = trained_length(folder, read_json(folder / "config.json", "load takes the folder that holds config.json"))
    return options if length is None else {**options, "trained_length": length}


def loaded(
    folder: str | Path, dtype: str | None, device: str | None, position_options: Mapping[str, Any]
) -> LanguageModel:
    dtypes = None if dtype is None else getattr(torch, dtype)
    model = load(folder, dtypes, device_for(device), position_options=position_options)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{folder} holds an encoder: perplexity and recall need a language model")
    return model


def check_vocabulary(text: Text, model: LanguageModel, first: int = 0, end: int | None = None) -> None:
    """Refuse tokens that the model does not have."""
    highest = int(np.asarray(text.tokens[first:end]).max())
    if highest >= model.config.vocab_size:
        raise ValueError(
            f"the data has token {highest}, the model's vocabulary ends at {model.config.vocab_size - 1}: "
            "evaluate a model on tokens of its own tokenizer"
        )


def destination_of(
    folder: Path, model: LanguageModel, out: str | Path | None, options: Mapping[str, Any]
) -> Destination | None:
    """Where the figures of the model in a folder go; None: nowhere, as nobody named a place for those of a public
    model, or of positions with other options than saved."""
    config = read_json(folder / "config.json", "load takes the folder that holds config.json")
    if out is None and (options or not is_ours(config)):
        return None
    place, weights = folder if out is None else Path(out), with_options(weights_of(folder), options)
    if is_ours(config) and place.resolve() == folder.resolve() and not options:
        return Destination(place, weights, None)
    check_same_model(place, weights)
    place.mkdir(parents=True, exist_ok=True)
    about = about_model(folder, model.config.to_dict(), trained_length(folder, config), weights, options)
    return Destination(place, weights, about)


def text_of(data: Data | PlainText | np.ndarray[Any, Any], split: str) -> Text:
    if isinstance(data, np.ndarray):
        return Text(data, None, split)
    if isinstance(data, PlainText):
        return Text(data.tokens, data, "text")
    return Text(data.validation if split == "validation" else data.train, data, split)


def tested_on(model: LanguageModel, text: Text) -> Record:
    """What every record says of its text and of how the model computes."""
    record = {
        "split": text.split,
        "data": text.identity,
        "data_folder": text.folder,
        "dtype": str(model.trunk.embedding.weight.dtype).removeprefix("torch."),
    }
    return record if text.tokenizer is None else record | {"tokenizer": text.tokenizer}


def why_not_at(model: LanguageModel, length: int) -> str | None:
    """Why there is nothing to measure at this length, in words; None where there is."""
    limit = model.position.max_length
    if limit is None or length <= limit:
        return None
    return f"{model.config.position} positions end at {limit} tokens: there is nothing beyond to evaluate"


def _warm_up(model: LanguageModel, text: Text, config: EvaluateConfig) -> None:
    size = min([WARM_UP, len(text.tokens) - 1, model.position.max_length or WARM_UP])
    list(losses(model, text.tokens, windows(0, size, size, size), chunk=config.chunk_of(size), batch_tokens=size))


def _at_length(
    model: LanguageModel,
    text: Text,
    config: EvaluateConfig,
    length: int,
    span: tuple[int, int],
    on_scored: Progress | None,
) -> Record:
    first, last = span
    stride = config.stride_of(length)
    record: Record = {
        "length": length,
        "mode": config.mode,
        "stride": stride,
        "first_token": first + 1,
        "end_token": last + 1,
        **tested_on(model, text),
    }
    if config.attention != "auto":
        record["attention"] = config.attention
    if text.tokenizer is not None:
        record["whole_text"] = (first, last) == (0, len(text.tokens) - 1)
    if (reason := why_not_at(model, length)) is not None:
        return record | {"skipped": reason}
    device = model.trunk.embedding.weight.device
    sums, counts = np.zeros(length), np.zeros(length, dtype=np.int64)
    fed = 0
    begin, waiting = time.perf_counter(), Waiting()
    with peak_memory(device) as peak:
        for window, found in losses(
            model,
            text.tokens,
            windows(first, last, length, stride),
            chunk=config.chunk_of(length),
            batch_tokens=config.batch_tokens,
            on_scored=None if on_scored is None else lambda count: on_scored(length, count, last - first),
        ):
            here = slice(window.skipped, window.size)
            sums[here] += found.double().sum(0).cpu().numpy()
            counts[here] += len(found)
            fed += len(found) * window.size
    seconds, share = time.perf_counter() - begin, waiting.share()
    scored = int(counts.sum())
    assert scored == last - first, "every token is scored exactly once"
    total = math.fsum(sums)
    if not math.isfinite(total):
        return record | {"skipped": "the losses are not finite: the model has diverged"}
    record |= figures(total, scored, *text.counts(first, last))
    record["loss_by_position"] = _binned(sums, counts, length)
    record |= {
        "seconds": round(seconds, 4),
        "fed_tokens": fed,
        "tokens_per_second": round(scored / seconds, 1),
        "peak_memory_bytes": peak.bytes,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "waiting": share,
    }
    if state.current is not None:
        record["ranks"] = state.current.size
    elif config.kept and config.attention == "auto":
        start = max(0, first) if first + length <= last else max(0, last - length)
        sample = torch.from_numpy(np.asarray(text.tokens[start : start + length]).astype(np.int64))[None].to(device)
        if (kept := kept_keys(model, sample, config.chunk)) is not None:
            record |= kept
    return record


def _binned(sums: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], length: int) -> dict[str, Sequence[float]]:
    """Sums of losses and counts between edges: bins that scored nothing stay, with count 0."""
    edges = position_edges(length)
    inner = edges[:-1]
    return {
        "edges": edges,
        "nll_sum": [float(value) for value in np.add.reduceat(sums, inner)],
        "count": [int(value) for value in np.add.reduceat(counts, inner)],
    }
