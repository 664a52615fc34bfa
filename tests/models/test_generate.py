"""Generation: the same tokens with and without a cache, and an end in time."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo import eval_frame

import trainshort as ts
from tests.models.small import EVERY_POSITION, language_model, left_padded, random_tokens
from trainshort.models import generate as module


def by_hand(model: ts.LanguageModel, tokens: Tensor, count: int) -> Tensor:
    """Greedy: the most probable token of the whole text, again and again."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1)[:, None]), dim=1)
    return tokens


# With and without a cache


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"seed": 7}, {"seed": 7, "top_k": 9, "top_p": 0.8}], ids=str
)
def test_same_tokens_with_and_without_a_cache(options: dict[str, Any], position: str) -> None:
    model, tokens = language_model(position), random_tokens(3, 120)
    cached = model.generate(tokens, max_new_tokens=20, **options)
    plain = model.generate(tokens, max_new_tokens=20, use_cache=False, **options)
    assert cached.shape == (3, 140)
    assert torch.equal(cached, plain)
    assert torch.equal(cached[:, :120], tokens)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_greedy_is_the_argmax_by_hand(position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 30)
    assert torch.equal(model.generate(tokens, max_new_tokens=12, temperature=0.0), by_hand(model, tokens, 12))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 150)
    expected = model.generate(tokens, max_new_tokens=5, temperature=0.0)
    monkeypatch.setattr(module, "PREFILL", 40)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, temperature=0.0), expected)


def test_a_cache_computes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = language_model(), random_tokens(2, 50)
    lengths = []
    forward = ts.LanguageModel.forward

    def count(self: ts.LanguageModel, part: Tensor, **options: Any) -> Tensor:
        lengths.append(part.shape[1])
        return forward(self, part, **options)

    monkeypatch.setattr(ts.LanguageModel, "forward", count)
    model.generate(tokens, max_new_tokens=6)
    assert lengths == [50, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_rows_are_continued_like_rows_alone(use_cache: bool, position: str) -> None:
    model = language_model(position)
    rows = [random_tokens(1, length, seed=length)[0] for length in (140, 60, 1)]
    tokens, mask = left_padded(rows, filler=5)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "use_cache": use_cache}
    out = model.generate(tokens, key_padding_mask=mask, **options)
    for index, row in enumerate(rows):
        assert torch.equal(out[index, -len(row) - 8 :], model.generate(row[None], **options)[0])


def test_left_padding_of_a_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a part of a row's prompt is nothing but padding."""
    monkeypatch.setattr(module, "PREFILL", 40)
    model = language_model("rotary")
    rows = [random_tokens(1, length, seed=length)[0] for length in (140, 10)]
    tokens, mask = left_padded(rows)
    out = model.generate(tokens, key_padding_mask=mask, max_new_tokens=8, temperature=0.0)
    assert torch.equal(out[1, -18:], model.generate(rows[1][None], max_new_tokens=8, temperature=0.0)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    model, tokens = language_model(dtype=dtype), random_tokens(2, 30)
    assert model.generate(tokens, max_new_tokens=6, seed=0).shape == (2, 36)


def test_numbers_may_be_those_of_numpy() -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    expected = model.generate(tokens, max_new_tokens=6, seed=3)
    assert torch.equal(model.generate(tokens, max_new_tokens=np.int64(6), seed=np.int64(3)), expected)


def test_int32_prompts_stay_int32() -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    out = model.generate(tokens.int(), max_new_tokens=6, seed=0)
    assert out.dtype == torch.int32
    assert torch.equal(out.long(), model.generate(tokens, max_new_tokens=6, seed=0))


# Stopping and streaming


SAMPLED: dict[str, Any] = {"max_new_tokens": 20, "temperature": 3.0, "seed": 0}


def free_run(batch: int) -> tuple[ts.LanguageModel, Tensor, Tensor]:
    """A lively continuation by 20 tokens, without a stop."""
    model, tokens = language_model(), random_tokens(batch, 30)
    free = model.generate(tokens, **SAMPLED)
    assert all(len(set(row[30:].tolist())) > 10 for row in free)
    return model, tokens, free


def first_of(row: Tensor, stops: list[int]) -> int:
    """Where a stop token is first said after the prompt."""
    return next(place for place in range(30, 50) if int(row[place]) in stops)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_stops_is_filled_with_the_stop_token(use_cache: bool) -> None:
    model, tokens, free = free_run(2)
    stop = next(int(token) for token in free[0, 33:] if token not in free[1, 30:] and token not in free[0, 30:33])
    out = model.generate(tokens, stop_tokens=[stop], use_cache=use_cache, **SAMPLED)
    end = first_of(free[0], [stop])
    assert torch.equal(out[0, : end + 1], free[0, : end + 1])
    assert out[0, end:].tolist() == [stop] * (50 - end)
    assert torch.equal(out[1], free[1])


def test_generation_ends_when_every_row_has() -> None:
    """Rows may end with different stop tokens at different times; the last one to end decides."""
    model, tokens, free = free_run(3)
    stops = [int(free[row, 32 + 3 * row]) for row in range(3)]
    ends = [first_of(row, stops) for row in free]
    assert len(set(ends)) > 1
    out = model.generate(tokens, stop_tokens=set(stops), **SAMPLED)
    assert out.shape == (3, max(ends) + 1)
    for row, end in enumerate(ends):
        assert torch.equal(out[row, : end + 1], free[row, : end + 1])
        assert bool((out[row, end:] == free[row, end]).all())


@pytest.mark.parametrize("options", [{}, {"bounded": True}, {"use_cache": False}], ids=str)
def test_eos_token_id_is_another_name_of_stop_tokens(options: dict[str, Any]) -> None:
    model, tokens, free = free_run(2)
    one, two = int(free[0, 33]), int(free[1, 36])
    expected = model.generate(tokens, stop_tokens=[one], **SAMPLED)
    assert torch.equal(model.generate(tokens, eos_token_id=one, **SAMPLED, **options), expected)
    columns: list[Tensor] = []
    out = model.generate(
        tokens, eos_token_id=[one, two], on_token=lambda column: columns.append(column.clone()), **SAMPLED, **options
    )
    assert torch.equal(out, model.generate(tokens, stop_tokens=[one, two], **SAMPLED))
    assert out.shape[1] < 50
    assert len(columns) == out.shape[1] - 30


def test_a_stop_token_in_the_prompt_does_not_stop() -> None:
    model, tokens, free = free_run(1)
    said = next(token for token in tokens[0].tolist() if token not in free[0, 30:])
    assert torch.equal(model.generate(tokens, stop_tokens=[said], **SAMPLED), free)
    tokens[0, -1] = said
    ended = model.generate(tokens, stop_tokens=[said], **SAMPLED)
    assert ended.shape[1] > 31


@pytest.mark.parametrize("stopping", [True, False])
def test_every_column_is_streamed(stopping: bool) -> None:
    model, tokens, free = free_run(2)
    stops = [int(free[0, 35]), int(free[1, 38])] if stopping else []
    columns: list[Tensor] = []
    out = model.generate(tokens, stop_tokens=stops, on_token=lambda column: columns.append(column.clone()), **SAMPLED)
    assert out.shape[1] < 50 or not stopping
    assert all(column.shape == (2,) for column in columns)
    assert torch.equal(torch.stack(columns, dim=1), out[:, 30:])


@pytest.mark.parametrize("room", [4096, 7])
def test_without_a_limit_it_goes_on_until_all_rows_have_ended(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(module, "ROOM", room)
    model, tokens, free = free_run(1)
    stop = int(free[0, 45])
    expected = model.generate(tokens, stop_tokens=[stop], **SAMPLED)
    assert torch.equal(model.generate(tokens, stop_tokens=[stop], **SAMPLED | {"max_new_tokens": None}), expected)


def test_without_a_limit_on_token_can_end_it() -> None:
    model, tokens, free = free_run(2)
    columns: list[Tensor] = []

    def collect(column: Tensor) -> None:
        columns.append(column.clone())
        if len(columns) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(tokens, on_token=collect, **SAMPLED | {"max_new_tokens": None})
    assert torch.equal(torch.stack(columns, dim=1), free[:, 30:])


def test_columns_are_no_part_of_the_text() -> None:
    """Who writes to one changes nothing."""
    model, tokens, free = free_run(2)
    for use_cache in (True, False):
        out = model.generate(tokens, use_cache=use_cache, on_token=lambda column: column.zero_(), **SAMPLED)
        assert torch.equal(out, free)


def test_without_a_limit_learned_positions_still_have_one() -> None:
    model, tokens = language_model("learned", max_length=40), random_tokens(2, 30)
    assert model.generate(tokens, max_new_tokens=None).shape == (2, 41)


def test_cache_and_text_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, free = free_run(2)
    monkeypatch.setattr(module, "ROOM", 3)
    assert torch.equal(model.generate(tokens, **SAMPLED), free)


# Around it


def test_a_graph_that_cannot_be_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot use CUDA graphs: the model is on cpu"):
        language_model().generate(random_tokens(2, 30), max_new_tokens=5, cuda_graph=True)
    with pytest.raises(RuntimeError, match="cannot use CUDA graphs: use_cache=False"):
        language_model().generate(random_tokens(2, 30), max_new_tokens=5, cuda_graph=True, use_cache=False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cuda_graph", [None, False])
def test_on_a_cpu_nobody_misses_graphs(cuda_graph: bool | None) -> None:
    language_model().generate(random_tokens(2, 30), max_new_tokens=5, cuda_graph=cuda_graph)


def test_logits_that_are_not_finite() -> None:
    model = language_model()
    with torch.no_grad():
        model.head.weight[3, 2] = math.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        model.generate(random_tokens(2, 30), max_new_tokens=5)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(training: bool) -> None:
    model, tokens = language_model(dropout=0.5).train(training), random_tokens(2, 30)
    seen = []
    out = model.generate(tokens, max_new_tokens=5, temperature=0.0, on_token=lambda _: seen.append(model.training))
    assert model.training is training
    assert seen == [False] * 5
    assert torch.equal(out, by_hand(model.eval(), tokens, 5))


def test_the_mode_is_restored_after_an_error() -> None:
    model = language_model().train()

    def fail(column: Tensor) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        model.generate(random_tokens(2, 30), max_new_tokens=5, on_token=fail)
    assert model.training
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("failing", [False, True])
def test_every_part_gets_its_own_mode_back(failing: bool) -> None:
    """Who has frozen the embedding and one block in evaluation mode finds them so."""
    model = language_model(dropout=0.5).train()
    model.trunk.embedding.eval()
    model.trunk.blocks[0].eval()
    before = {name: part.training for name, part in model.named_modules()}
    assert set(before.values()) == {True, False}
    seen: list[bool] = []

    def look(column: Tensor) -> None:
        seen.extend(part.training for part in model.modules())
        if failing:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough") if failing else contextlib.nullcontext():
        model.generate(random_tokens(2, 30), max_new_tokens=5, on_token=look)
    assert seen
    assert not any(seen)
    assert {name: part.training for name, part in model.named_modules()} == before


def test_a_part_left_in_training_mode_is_left_so() -> None:
    """The other way round: a model in evaluation mode whose dropout somebody keeps on."""
    model = language_model(dropout=0.5)
    model.trunk.dropout.train()
    model.generate(random_tokens(2, 30), max_new_tokens=2)
    assert [name for name, part in model.named_modules() if part.training] == ["trunk.dropout"]


def test_nothing_asks_for_a_gradient() -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    model.generate(tokens, max_new_tokens=5)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_in_inference_mode(position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 30)
    expected = model.generate(tokens, max_new_tokens=5, temperature=0.0)
    with torch.inference_mode():
        assert torch.equal(model.generate(tokens, max_new_tokens=5, temperature=0.0), expected)


def test_no_new_tokens_are_the_prompt() -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    out = model.generate(tokens, max_new_tokens=0)
    assert torch.equal(out, tokens)


def test_the_prompt_is_left_alone() -> None:
    model, tokens = language_model(), random_tokens(2, 30)
    before = tokens.clone()
    out = model.generate(tokens, max_new_tokens=4)
    out.zero_()
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("use_cache", [True, False])
def test_learned_positions_say_when_the_context_ends(use_cache: bool) -> None:
    """The last token needs no position: it is not read."""
    model, tokens = language_model("learned", max_length=40), random_tokens(2, 30)
    assert model.generate(tokens, max_new_tokens=11, use_cache=use_cache).shape == (2, 41)
    with pytest.raises(
        ValueError, match=r"learned positions end at 40 tokens: a prompt of 30 leaves room for 11 new"
    ):
        model.generate(tokens, max_new_tokens=12, use_cache=use_cache)
    with pytest.raises(ValueError, match=r"learned positions end at 40 tokens: a prompt of 50 leaves room for 0 new"):
        model.generate(random_tokens(2, 50), max_new_tokens=1, use_cache=use_cache)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, or None for no end; got -1"),
        ({"temperature": -0.5}, r"temperature must be at least 0 \(0 is greedy\), got -0.5"),
        ({"temperature": math.nan}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1 or None, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\] or be None, got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\] or be None, got 1.5"),
        ({"top_p": math.nan}, "top_p must lie in"),
        ({"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)}, r"key_padding_mask must .*\[2, 10\]"),
        ({"key_padding_mask": torch.ones(2, 11, dtype=torch.bool)}, r"key_padding_mask must .*\[2, 10\]"),
        ({"key_padding_mask": torch.arange(10).expand(2, -1) < 7}, "left"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "_".join(value),
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_arguments_that_cannot_be(use_cache: bool, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        language_model().generate(random_tokens(2, 10), **({"max_new_tokens": 3, "use_cache": use_cache} | options))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an int, or None for no end; got 2.5"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an int"),
        ({"stop_tokens": 3}, TypeError, "stop_tokens must be several token ids.*got 3"),
        ({"stop_tokens": "ab"}, TypeError, "stop_tokens must be several token ids"),
        ({"stop_tokens": [3, 61]}, ValueError, r"stop_tokens must lie in \[0, 61\), the vocabulary; got 61"),
        ({"stop_tokens": {2**40}}, ValueError, r"stop_tokens must lie in .*; got 1099511627776"),
        ({"eos_token_id": -1}, ValueError, r"eos_token_id must lie in \[0, 61\), the vocabulary; got -1"),
        ({"max_new_tokens": None}, ValueError, "max_new_tokens=None needs stop_tokens, eos_token_id or on_token"),
        ({"max_new_tokens": None, "stop_tokens": ()}, ValueError, "max_new_tokens=None needs stop_tokens"),
        ({"eos_token_id": 2.0}, TypeError, "eos_token_id must be a token id, or several.*got 2.0"),
        ({"eos_token_id": True}, TypeError, "eos_token_id must be a token id, or several.*got True"),
        ({"eos_token_id": 3, "stop_tokens": [3]}, ValueError, "say the same thing: pass one of them"),
        ({"eos_token": 3}, TypeError, "unexpected keyword argument 'eos_token'"),
        ({"seed": 2**64}, ValueError, "seed must be an int of 64 bits"),
        ({"seed": 1.0}, ValueError, "seed must be an int of 64 bits"),
        ({"tolerance": 0.1}, ValueError, "tolerance is an option of bounded caches"),
        ({"on_failure": "raise"}, ValueError, "on_failure is an option of bounded caches"),
        ({"bounded": True, "on_failure": "ignore"}, ValueError, "on_failure must be 'rerun' or 'raise'"),
        ({"bounded": True, "use_cache": False}, ValueError, "bounded=True is a kind of cache"),
    ],
    ids=str,
)
def test_what_is_no_number_of_the_kind(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        language_model().generate(random_tokens(1, 4), **({"max_new_tokens": 3} | options))


def test_a_tolerance_for_float64() -> None:
    model, prompt = language_model().double(), random_tokens(1, 8)
    with pytest.raises(ValueError, match="tolerance"):
        model.generate(prompt, max_new_tokens=4, bounded=True)
    bounded = model.generate(prompt, max_new_tokens=4, temperature=0.0, bounded=True, tolerance=1e-12)
    assert torch.equal(bounded, model.generate(prompt, max_new_tokens=4, temperature=0.0))


@pytest.mark.parametrize("options", [{}, {"bounded": True}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("row", [[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], ids=str)
def test_padding_that_is_not_on_the_left_is_refused(row: list[int], options: dict[str, Any]) -> None:
    """Also for one token alone, before anybody else looks: the last column is what generation goes on from."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], row]).bool()
    with pytest.raises(ValueError, match=r"padded on the left: key_padding_mask must end in True .* row 2 is not so"):
        language_model().generate(random_tokens(3, 4), max_new_tokens=1, key_padding_mask=mask, **options)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_mask_of_ints_is_refused(use_cache: bool) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"key_padding_mask must be (a )?bool"):
        language_model().generate(random_tokens(2, 10), max_new_tokens=3, key_padding_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize("shape", [(10,), (2, 0), (0, 10)], ids=str)
def test_a_prompt_holds_at_least_one_token(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        language_model().generate(torch.zeros(shape, dtype=torch.int64), max_new_tokens=3)


@pytest.mark.parametrize("prompt", [[[1, 2, 3]], ["a text", 3], ("a text",), 3, None], ids=repr)
def test_a_prompt_is_a_tensor_or_a_text(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"tokens must be an int tensor .*, a string or a list of strings; got"):
        language_model().generate(prompt, max_new_tokens=3)


@pytest.mark.parametrize("prompt", ["a text", ["a text"]], ids=repr)
def test_a_text_needs_a_tokenizer(prompt: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"got {type(prompt).__name__}: this model has no tokenizer .*encode\(text\)"
    ):
        language_model().generate(prompt, max_new_tokens=3)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_head_that_is_no_linear_layer(bounded: bool) -> None:
    """Such as a quantized one, or one with adapters, which has no weight."""
    model, tokens = language_model(), random_tokens(2, 10)
    expected = model.generate(tokens, max_new_tokens=5, temperature=0.0)
    model.head = torch.nn.Sequential(model.head)
    assert torch.equal(model.generate(tokens, max_new_tokens=5, temperature=0.0, bounded=bounded), expected)


def test_threads_may_share_a_model() -> None:
    """Each gets its own text, and the last one to end puts back the model's mode and leave to compile."""
    model, tokens = language_model(dropout=0.2).train(), random_tokens(1, 10)
    expected = model.generate(tokens, max_new_tokens=8, temperature=0.0)
    started, stance = threading.Barrier(2), eval_frame._stance.stance
    found: dict[int, Tensor] = {}

    def run(number: int, count: int) -> None:
        began: list[bool] = []

        def wait(_: Tensor) -> None:
            if not began:
                began.append(True)
                started.wait(timeout=60)

        found[number] = model.generate(tokens, max_new_tokens=count, temperature=0.0, on_token=wait)

    threads = [threading.Thread(target=run, args=each) for each in enumerate((2, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], expected[:, :12])
    assert torch.equal(found[1], expected)
    assert model.training
    assert eval_frame._stance.stance == stance == "default"
