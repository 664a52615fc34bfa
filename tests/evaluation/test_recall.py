"""Recall: what a trial is made of, models that remember all, a little or nothing, and exact likelihoods."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import trainshort as ts
from tests.models.small import FOX_PRO, VOCABULARY, lively, small_config
from trainshort.evaluation.recall import losses_after, prompt_of, recall, trials
from trainshort.evaluation.recall_config import ANSWER, CUE, RecallConfig, shortest_window

TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=4000).astype(np.uint16)


class Remembering:
    """In place of a model: expects what followed the last `CUE` tokens when they were there before, if that is at
    most `reach` tokens ago. Hidden states are the expected tokens."""

    def __init__(self, reach: int) -> None:
        self.reach, self.training = reach, False
        self.position = SimpleNamespace(max_length=None)
        self.config = small_config()
        self.embedding = SimpleNamespace(weight=torch.zeros(1))

    def eval(self) -> None: ...

    def train(self, training: bool) -> None: ...

    @property
    def trunk(self) -> Any:
        def run(tokens: torch.Tensor, cache: Any) -> torch.Tensor:
            rows = []
            for row, new in enumerate(tokens.tolist()):
                seen = cache.texts[row]
                expected = []
                for place, token in enumerate(new, 1):
                    seen.append(token)
                    needed = len(new) < 20 or place == len(new)  # of a prompt, only what comes next
                    expected.append(self._expected(seen) if needed else -1)
                rows.append(expected)
            return torch.tensor(rows)[..., None].float()

        run.embedding = self.embedding  # type: ignore[attr-defined]
        return run

    def _expected(self, seen: list[int]) -> int:
        for end in range(len(seen) - 1, max(CUE, len(seen) - self.reach) - 1, -1):
            if seen[end - CUE : end] == seen[-CUE:]:
                return seen[end]
        return -1

    def make_cache(self, rows: int, capacity: int) -> Any:
        cache = SimpleNamespace(texts=[[] for _ in range(rows)])

        def return_to(lengths: list[int]) -> None:
            cache.texts = [text[:length] for text, length in zip(cache.texts, lengths, strict=True)]

        cache.bookmark, cache.return_to = lambda: [len(text) for text in cache.texts], return_to
        return cache

    def head_loss(self, hidden: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        return (hidden[..., 0] != targets).float() + 1e-3 * targets  # ties are broken by what a token is


@pytest.mark.parametrize("task", ANSWER)
@pytest.mark.parametrize("depth", [0, 30, 100])
def test_a_window_holds_the_cue_twice_and_the_answer_where_it_should(task: str, depth: int) -> None:
    length, size = 200, ANSWER[task]
    for trial in trials(TOKENS, task, length, RecallConfig(trials=5)):
        prompt = prompt_of(trial, depth)
        assert len(prompt) + size - 1 == length
        place = round((length + 1 - 2 * (CUE + size)) * depth / 100)
        assert prompt[place : place + CUE].tolist() == prompt[-CUE:].tolist() == trial.cue.tolist()
        assert prompt[place + CUE : place + CUE + size].tolist() == trial.answers[trial.shown].tolist()
        assert len({tuple(answer) for answer in trial.answers.tolist()}) == 8


def test_trials_are_the_same_at_every_length_but_for_the_filler() -> None:
    config = RecallConfig(trials=10)
    for short, long in zip(trials(TOKENS, "copy", 64, config), trials(TOKENS, "copy", 1000, config), strict=True):
        assert short.cue.tolist() == long.cue.tolist()
        assert short.answers.tolist() == long.answers.tolist()
        assert short.shown == long.shown
    others = trials(TOKENS, "copy", 64, RecallConfig(trials=10, seed=1))
    assert any(
        a.cue.tolist() != b.cue.tolist() for a, b in zip(trials(TOKENS, "copy", 64, config), others, strict=True)
    )


@pytest.mark.parametrize("length", [200, 3872])  # the longest that the text is enough for
def test_cues_and_passages_stand_nowhere_else_in_a_window(length: int) -> None:
    """Distractors too: a model that has seen one would be right to expect it."""
    places = np.arange(4000)
    for task, task_size in ANSWER.items():
        for trial in trials(places, task, length, RecallConfig(trials=20)):
            assert len(trial.filler) == length + 1 - 2 * (CUE + task_size)
            assert (np.diff(trial.filler) > 0).all()
            assert not np.isin(trial.cue, trial.filler).any()
            if task == "copy":
                assert not np.isin(trial.answers, trial.filler).any()


@pytest.mark.slow
def test_whoever_remembers_is_right_and_only_as_far_back_as_that() -> None:
    lengths = (100, 400)
    all_of_it = recall(Remembering(10_000), TOKENS, RecallConfig(lengths=lengths, trials=20))  # type: ignore[arg-type]
    assert [record["correct"] for record in all_of_it] == [[20] * 5] * 4
    assert all(gain > 0.2 for record in all_of_it for gain in record["gain"])
    some = recall(Remembering(150), TOKENS, RecallConfig(lengths=(400,), trials=20))  # type: ignore[arg-type]
    for record in some:
        assert record["correct"][-2:] == [20, 20]  # at 75 and 100%
        assert max(record["correct"][:2]) < 10


@pytest.mark.parametrize("position", ["alibi", "none"])
def test_a_model_that_knows_nothing_is_right_by_chance(position: str) -> None:
    torch.manual_seed(0)
    model = ts.LanguageModel(small_config(position))
    records = recall(model, TOKENS, RecallConfig(lengths=(64,), trials=60))
    for record in records:
        for correct in record["correct"]:
            assert abs(correct - 60 / 8) < 4.5 * math.sqrt(60 / 8 * 7 / 8)


@pytest.mark.parametrize("changes", [{}, {"position": "rotary"}, {"position": "fox", **FOX_PRO}, {"position": "t5"}])
def test_likelihoods_are_those_of_whole_windows(changes: dict[str, Any]) -> None:
    """Prompts once, and answers one after the other from the same cache: the shift of keys and values included."""
    model = lively(ts.LanguageModel(small_config(**changes))).double().eval()
    batch = list(trials(TOKENS, "copy", 200, RecallConfig(trials=3, choices=4)))
    prompts = np.stack([prompt_of(trial, 40) for trial in batch])
    found = losses_after(model, prompts, np.stack([trial.answers for trial in batch]), chunk=128)
    for row, trial in enumerate(batch):
        prompt = torch.from_numpy(prompt_of(trial, 40).astype(np.int64))
        for choice, answer in enumerate(torch.from_numpy(trial.answers.astype(np.int64))):
            window = torch.cat((prompt, answer))
            logits = model(window[None, :-1])[0, -len(answer) :]
            expected = F.cross_entropy(logits, answer, reduction="sum")
            torch.testing.assert_close(found[row, choice], expected, rtol=1e-9, atol=1e-9)


def test_lengths_beyond_learned_positions_are_left_out() -> None:
    model = ts.LanguageModel(small_config("learned", max_length=100))
    short, _, long, _ = recall(model, TOKENS, RecallConfig(lengths=(64, 128), trials=2))
    assert "skipped" not in short
    assert "positions end at 100" in long["skipped"]


def test_batches_change_nothing() -> None:
    model = lively(ts.LanguageModel(small_config()))
    one, many = (
        recall(model, TOKENS, RecallConfig(lengths=(64,), depths=(50,), trials=5, batch_tokens=tokens))
        for tokens in (1, 300)
    )
    assert [record["correct"] for record in one] == [record["correct"] for record in many]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (shortest_window() - 1,)}, "at least 47"),
        ({"depths": (101,)}, "0 to 100"),
        ({"depths": ()}, "one or more"),
        ({"choices": 1}, "choices must be at least 2"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"chunk": 100}, "multiple of 128"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecallConfig(**changes)


def test_texts_that_do_not_do() -> None:
    model = ts.LanguageModel(small_config())
    with pytest.raises(ValueError, match="too few to fill windows of 5,000"):
        recall(model, TOKENS, RecallConfig(lengths=(5000,)))
    with pytest.raises(ValueError, match=r"windows of 3,873 without its answers \(4,001\)"):
        recall(model, TOKENS, RecallConfig(lengths=(3873,)))
    with pytest.raises(ValueError, match="repeats itself"):
        recall(model, np.zeros(500, dtype=np.uint16), RecallConfig(lengths=(64,)))


def test_a_bookmark_of_a_bounded_cache_is_refused() -> None:
    with pytest.raises(TypeError, match="full cache"):
        ts.KeyValueCache(small_config(), 1, bounded=True).bookmark()
