"""Recall: whether a model finds again what stood once in its window, by length of the window and depth in it.

A trial is a window of the user's own text into which a cue with its answer was put somewhere; it ends with the cue.
The model then chooses among several answers: the one that the window makes likelier than the cue alone does, by most,
so that small models say something too. Answers are drawn alike, and the one that was shown is any of them: a model
that remembers nothing is right in one of `choices` trials, the level of chance.

    passkey   the answer is a few tokens from anywhere in the text, which no model could guess
    copy      the answer is a passage of the text

Trials are the same at every depth and, but for the filler, at every length. The filler is the text without the cue
and the answers of its trial: none of them is in the window but where it was put.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainshort.data.plain import PlainText
from trainshort.evaluation.evaluate import (
    Data,
    Text,
    check_vocabulary,
    opened_model,
    tested_on,
    text_of,
    why_not_at,
)
from trainshort.evaluation.recall_config import ANSWER, CUE, RecallConfig
from trainshort.evaluation.recall_records import Record, add_record
from trainshort.models import LanguageModel

Progress = Callable[[int, int, int], None]  # length, newly fed tokens, all that will be
ATTEMPTS = 100  # at drawing answers that differ


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
        cue_at = np.arange(place, place + CUE)
        answers_at = _answers(tokens, task, config.choices, draw)
        shown = int(draw.integers(config.choices))
        passages = (cue_at,) if task == "passkey" else (cue_at, answers_at.ravel())
        filler_at = _filler(len(tokens), room, np.unique(np.concatenate(passages)), draw.random())
        filler, cue, answers = (np.asarray(tokens[places]) for places in (filler_at, cue_at, answers_at))
        yield Trial(filler, cue, answers, shown)


def _filler(tokens: int, room: int, without: np.ndarray[Any, Any], where: float) -> np.ndarray[Any, Any]:
    """`room` places one after another, but for those of `without`, which is sorted. where: from 0 to 1."""
    start = int(where * (tokens - len(without) - room + 1))
    places = np.arange(start, start + room)  # of the text that is left
    return places + np.searchsorted(without - np.arange(len(without)), places, side="right")


def _answers(
    tokens: np.ndarray[Any, Any], task: str, choices: int, draw: np.random.Generator
) -> np.ndarray[Any, Any]:
    """The places in the text of different ones, [choices, size]."""
    size = ANSWER[task]
    found: dict[bytes, np.ndarray[Any, Any]] = {}
    for _ in range(ATTEMPTS * choices):
        if task == "passkey":
            places = draw.integers(len(tokens), size=size)
        else:
            place = int(draw.integers(len(tokens) - size + 1))
            places = np.arange(place, place + size)
        found.setdefault(np.asarray(tokens[places]).astype("<i8").tobytes(), places)
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
    data: Data | PlainText | np.ndarray[Any, Any],
    config: RecallConfig,
    *,
    out: str | Path | None = None,
    position_options: Mapping[str, Any] = MappingProxyType({}),
    on_fed: Progress | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """One record for each task and length. With a run's folder, each is also put into its recall.json at once.

    data, out, position_options: as `evaluate` has them.
    """
    if not config.lengths:
        raise ValueError("lengths must name at least one length")
    text = text_of(data, config.split)
    if len(text.tokens) < (least := max(config.lengths) + config.choices * max(ANSWER.values())):
        raise ValueError(
            f"the text has {len(text.tokens):,} tokens, too few to fill windows of {max(config.lengths):,} without "
            f"its answers ({least:,}): choose shorter lengths, or other data"
        )
    network, destination = opened_model(model, config.dtype, config.device, out, position_options)
    check_vocabulary(text, network)
    training = network.training
    network.eval()
    records = []
    try:
        for length in config.lengths:
            for task in ANSWER:
                record = _at_length(network, text, config, task, length, on_fed)
                if destination is not None:
                    record = {"model": destination.weights} | record
                    add_record(destination.folder, record, destination.about)
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
        **tested_on(model, text),
    }
    if (reason := why_not_at(model, length)) is not None:
        return record | {"skipped": reason}
    begin = time.perf_counter()
    drawn = list(trials(text.tokens, task, length, config))
    rows = max(1, config.batch_tokens // length)
    total = length * len(drawn) * len(config.depths) * len(ANSWER)
    correct, gain = [0] * len(config.depths), [0.0] * len(config.depths)
    for start in range(0, len(drawn), rows):
        batch = drawn[start : start + rows]
        for place, losses in enumerate(_losses_by_depth(model, batch, config)):
            if not bool(losses.isfinite().all()):
                return record | {"skipped": "the losses are not finite: the model has diverged"}
            right, more = _compare(losses, batch)
            correct[place] += right
            gain[place] += more / ANSWER[task] / len(drawn)
            if on_fed is not None:
                on_fed(length, length * len(batch), total)
    return record | {
        "correct": correct,
        "gain": [round(each, 5) for each in gain],
        "seconds": round(time.perf_counter() - begin, 3),
        "device": str(model.trunk.embedding.weight.device),
    }


def _losses_by_depth(model: LanguageModel, batch: Sequence[Trial], config: RecallConfig) -> Iterator[Tensor]:
    """For each depth the loss of each answer at the end of its window, less that after its cue: [B, choices]."""
    answers = np.stack([trial.answers for trial in batch])
    after_cues = losses_after(model, np.stack([trial.cue for trial in batch]), answers, config.chunk)
    for depth in config.depths:
        windows = np.stack([prompt_of(trial, depth) for trial in batch])
        yield (losses_after(model, windows, answers, config.chunk) - after_cues).cpu()


def _compare(losses: Tensor, batch: Sequence[Trial]) -> tuple[int, float]:
    """How many trials have the shown answer as the likeliest, and by how much it is likelier than the mean of the
    others, summed over trials. losses: [B, choices]."""
    shown = torch.tensor([trial.shown for trial in batch])[:, None]
    of_shown, others = losses.gather(1, shown)[:, 0], losses.scatter(1, shown, torch.inf)
    mean_of_others = (losses.sum(1) - of_shown) / (losses.shape[1] - 1)
    return int((of_shown < others.amin(1)).sum()), float((mean_of_others - of_shown).sum())


@torch.inference_mode()
def losses_after(
    model: LanguageModel, prompts: np.ndarray[Any, Any], answers: np.ndarray[Any, Any], chunk: int
) -> Tensor:
    """The loss of each answer [B, choices, T] after its prompt [B, P], summed over its tokens: float64 [B, choices].

    Prompts are computed once.
    """
    device = model.trunk.embedding.weight.device
    prompt, answer = (torch.from_numpy(each.astype(np.int64)).to(device) for each in (prompts, answers))
    cache = model.make_cache(prompt.shape[0], prompt.shape[1] + answer.shape[2] - 1)
    for start in range(0, prompt.shape[1], chunk):
        last = model.trunk(prompt[:, start : start + chunk], cache=cache)[:, -1:]  # [B, 1, d_model]
    end = cache.bookmark()
    found = []
    for choice in answer.unbind(1):
        cache.return_to(end)
        hidden = torch.cat((last, model.trunk(choice[:, :-1], cache=cache)), dim=1)
        found.append(model.head_loss(hidden, choice, reduction="none").double().sum(1))
    return torch.stack(found, dim=1)
