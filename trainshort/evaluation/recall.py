"""Recall: whether a model finds again what stood once in its window, by length of the window and depth in it.

A trial is a window of the user's own text into which a cue with its answer was put somewhere; it ends with the cue.
The model then chooses among several answers by their likelihood. Answers are drawn alike and the one that was shown
is any of them, so a model that remembers nothing is right in one of `choices` trials: the level of chance.

    passkey   the answer is a few tokens from anywhere in the text, which no model could guess
    copy      the answer is a passage of the text

Trials are the same at every depth and, but for the filler, at every length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainshort.common.checks import is_int
from trainshort.common.settings import Settings
from trainshort.evaluation.config import BLOCK, DTYPES
from trainshort.evaluation.evaluate import Data, Text, loaded, text_of
from trainshort.evaluation.recall_records import Record, add_record
from trainshort.evaluation.records import fingerprint
from trainshort.models import LanguageModel

Progress = Callable[[int, int, int], None]  # length, newly fed tokens, all that will be
CUE = 8  # tokens
ANSWER = {"passkey": 4, "copy": 16}  # tokens
ATTEMPTS = 100  # at drawing answers that differ


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Settings):
    """Checked when it is made."""

    lengths: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(
        default=(0, 25, 50, 75, 100),
        metadata={"help": "where the answer stands, in percent of the window: 0 is its start"},
    )
    trials: int = field(default=50, metadata={"help": "windows at each length and depth"})
    choices: int = field(default=8, metadata={"help": "answers to choose among: chance is right once in so many"})
    seed: int = field(default=0, metadata={"help": "of the drawing of windows, cues and answers"})
    split: Literal["validation", "train"] = "validation"
    chunk: int = 8192
    batch_tokens: int = 8192
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "depths"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        least = {"trials": 1, "choices": 2, "seed": 0, "chunk": 1, "batch_tokens": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not is_int(value) or value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, as a whole number; got {value!r}")
        if self.chunk % BLOCK:
            raise ValueError(f"chunk must be a multiple of {BLOCK}, got {self.chunk}")
        if not self.depths or not all(is_int(depth) and 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths must be whole percentages from 0 to 100, one or more; got {self.depths!r}")
        if self.dtype not in (*DTYPES, None):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        for length in self.lengths:
            if not is_int(length) or length < shortest_window():
                raise ValueError(
                    f"lengths for recall must be at least {shortest_window()}, so that the cue and the answer fit "
                    f"into the window twice; got {length!r}"
                )


def shortest_window() -> int:
    """With no filler at all."""
    return 2 * (CUE + max(ANSWER.values())) - 1


class Trial(NamedTuple):
    filler: np.ndarray[Any, Any]
    cue: np.ndarray[Any, Any]
    answers: np.ndarray[Any, Any]  # [choices, tokens]
    shown: int  # which of them


def trials(tokens: np.ndarray[Any, Any], task: str, length: int, config: RecallConfig) -> Iterator[Trial]:
    """The trials of one length. What is drawn does not depend on the length, but for where a filler can begin."""
    size = ANSWER[task]
    room = length + 1 - 2 * (CUE + size)
    for number in range(config.trials):
        draw = np.random.default_rng([config.seed, number, sorted(ANSWER).index(task)])
        place = int(draw.integers(len(tokens) - CUE + 1))
        cue = np.asarray(tokens[place : place + CUE])
        answers = _answers(tokens, task, config.choices, draw)
        shown = int(draw.integers(config.choices))
        start = int(draw.random() * (len(tokens) - room + 1))
        yield Trial(np.asarray(tokens[start : start + room]), cue, answers, shown)


def _answers(
    tokens: np.ndarray[Any, Any], task: str, choices: int, draw: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Different ones, [choices, size]."""
    size = ANSWER[task]
    found: dict[bytes, np.ndarray[Any, Any]] = {}
    for _ in range(ATTEMPTS * choices):
        if task == "passkey":
            answer = np.array([tokens[int(place)] for place in draw.integers(len(tokens), size=size)])
        else:
            place = int(draw.integers(len(tokens) - size + 1))
            answer = np.asarray(tokens[place : place + size])
        found.setdefault(answer.astype("<i8").tobytes(), answer)
        if len(found) == choices:
            return np.stack(list(found.values()))
    raise ValueError(
        f"the text repeats itself so much that {choices} different answers of {size} tokens could not be drawn from "
        "it: use other text, or fewer choices (--choices)"
    )


def prompt_of(trial: Trial, depth: int) -> np.ndarray[Any, Any]:
    """The window up to the answer that is asked for: filler with the cue and its answer in it, and the cue again."""
    before = round(len(trial.filler) * depth / 100)
    shown = trial.answers[trial.shown]
    return np.concatenate((trial.filler[:before], trial.cue, shown, trial.filler[before:], trial.cue))


def recall(
    model: LanguageModel | str | Path,
    data: Data | np.ndarray[Any, Any],
    config: RecallConfig,
    *,
    on_fed: Progress | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """One record for each task and length. With a run's folder, each is also put into its recall.json at once."""
    if not config.lengths:
        raise ValueError("lengths must name at least one length")
    text = text_of(data, config.split)
    if len(text.tokens) < max(config.lengths):
        raise ValueError(
            f"the {config.split} text has {len(text.tokens):,} tokens, too few to fill windows of "
            f"{max(config.lengths):,}: choose shorter lengths, or other data"
        )
    folder = Path(model) if isinstance(model, (str, Path)) else None
    network = loaded(model, config.dtype, config.device) if isinstance(model, (str, Path)) else model
    weights = None if folder is None else fingerprint(folder / "model.safetensors")
    training = network.training
    network.eval()
    records = []
    try:
        for length in config.lengths:
            for task in ANSWER:
                record = _at_length(network, text, config, task, length, on_fed)
                if folder is not None and weights is not None:
                    record = {"model": weights} | record
                    add_record(folder, record)
                records.append(record)
                if on_record is not None:
                    on_record(record)
    finally:
        network.train(training)
    return records


def _at_length(
    model: LanguageModel, text: Text, config: RecallConfig, task: str, length: int, on_fed: Progress | None
) -> Record:
    record: Record = {
        "task": task,
        "length": length,
        "depths": list(config.depths),
        "trials": config.trials,
        "choices": config.choices,
        "seed": config.seed,
        "cue_tokens": CUE,
        "answer_tokens": ANSWER[task],
        "split": config.split,
        "data": text.identity,
        "data_folder": text.folder,
        "dtype": str(model.trunk.embedding.weight.dtype).removeprefix("torch."),
    }
    limit = model.position.max_length
    if limit is not None and length > limit:
        reason = f"{model.config.position} positions end at {limit} tokens: there is nothing beyond to evaluate"
        return record | {"skipped": reason}
    begin = time.perf_counter()
    drawn = list(trials(text.tokens, task, length, config))
    rows = max(1, config.batch_tokens // length)
    total = length * len(drawn) * len(config.depths) * len(ANSWER)
    correct, gain = [], []
    for depth in config.depths:
        right, more = 0, 0.0
        for start in range(0, len(drawn), rows):
            batch = drawn[start : start + rows]
            losses = _losses_of_answers(model, batch, depth, length, config.chunk).double().cpu()  # [B, choices]
            if not bool(losses.isfinite().all()):
                return record | {"skipped": "the losses are not finite: the model has diverged"}
            right_one = torch.tensor([trial.shown for trial in batch])[:, None]
            of_right = losses.gather(1, right_one)
            others = losses.scatter(1, right_one, torch.inf)
            right += int((of_right[:, 0] < others.amin(1)).sum())
            mean_of_others = (losses.sum(1) - of_right[:, 0]) / (losses.shape[1] - 1)
            more += float((mean_of_others - of_right[:, 0]).sum()) / ANSWER[task]
            if on_fed is not None:
                on_fed(length, length * len(batch), total)
        correct.append(right)
        gain.append(round(more / len(drawn), 5))
    seconds = time.perf_counter() - begin
    return record | {
        "correct": correct,
        "gain": gain,
        "seconds": round(seconds, 3),
        "device": str(model.trunk.embedding.weight.device),
    }


@torch.inference_mode()
def _losses_of_answers(model: LanguageModel, batch: Sequence[Trial], depth: int, length: int, chunk: int) -> Tensor:
    """The loss of each answer, summed over its tokens: [B, choices]. Prompts are computed once."""
    device = model.trunk.embedding.weight.device
    prompts = np.stack([prompt_of(trial, depth) for trial in batch]).astype(np.int64)
    answers = np.stack([trial.answers for trial in batch]).astype(np.int64)
    prompt, answer = torch.from_numpy(prompts).to(device), torch.from_numpy(answers).to(device)
    cache = model.make_cache(len(batch), length)
    for start in range(0, prompt.shape[1], chunk):
        last = model.trunk(prompt[:, start : start + chunk], cache=cache)[:, -1:]  # [B, 1, d_model]
    end = cache.bookmark()
    found = []
    for choice in answer.unbind(1):
        cache.return_to(end)
        rest = model.trunk(choice[:, :-1], cache=cache)
        hidden = torch.cat((last, rest), dim=1)
        found.append(model.head_loss(hidden, choice, reduction="none").sum(1))
    return torch.stack(found, dim=1)
