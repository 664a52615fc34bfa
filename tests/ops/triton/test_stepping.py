"""Stepping: one token after another at a place that the device knows gives what the plain cache gives.

What CUDA graphs replay, run here without one: the kernels in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import FOX_PRO, STEPPING_POSITIONS, language_model, left_padded, random_tokens
from trainshort.models import generate as module
from trainshort.models import stepping
from trainshort.models.stepping import Step


def steps(model: ts.LanguageModel, cache: ts.KeyValueCache, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)


def both(model: ts.LanguageModel, prompt: Tensor, later: Tensor, **first: Any) -> tuple[Tensor, Tensor]:
    """Logits of `later` with a plain cache, and with a stepping one that holds NaN where nothing is written."""
    plain, stepping = model.make_cache(len(prompt)), model.make_cache(len(prompt), prompt.shape[1] + 200)
    for buffer in (*stepping.keys, *stepping.values, *stepping.sums):
        buffer.fill_(math.nan)
    with torch.no_grad():
        for cache in (plain, stepping):
            model(prompt, cache=cache, **first)
    stepping.begin_steps()
    found = steps(model, stepping, later)
    stepping.end_steps()
    expected = steps(model, plain, later)
    assert stepping.length == plain.length == prompt.shape[1] + later.shape[1]
    for one, two in zip(stepping.norms, plain.norms, strict=True):
        blocks = -(-plain.length // 128)
        torch.testing.assert_close(one[:, :, :blocks], two[:, :, :blocks], rtol=2.0**-20, atol=0.0)
    return found, expected


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", STEPPING_POSITIONS)
def test_logits_are_those_of_a_plain_cache(position: str) -> None:
    """Across the border of a block, from where on the last block has few keys."""
    assert_same_logits(*both(language_model(position), random_tokens(2, 126), random_tokens(2, 4, seed=1)))


@pytest.mark.slow
@pytest.mark.parametrize("position", STEPPING_POSITIONS)
def test_left_padded_rows(position: str) -> None:
    rows = [random_tokens(1, length, seed=length)[0] for length in (130, 40, 1)]
    prompt, mask = left_padded(rows, filler=3)
    later = random_tokens(3, 3, seed=1)
    assert_same_logits(*both(language_model(position), prompt, later, key_padding_mask=mask))


@pytest.mark.parametrize("position", ["alibi", "rotary", "t5"])
def test_grouped_queries(position: str) -> None:
    model = language_model(position, num_kv_heads=2)
    assert_same_logits(*both(model, random_tokens(2, 60), random_tokens(2, 3, seed=1)))


@pytest.mark.parametrize("scaling", ["ntk", "yarn"])
def test_scaled_rotary_positions(scaling: str) -> None:
    """With rows behind padding, and queries that share keys."""
    options = {"scaling": scaling, "factor": 4.0} | ({"trained_length": 50} if scaling == "yarn" else {})
    model = language_model("rotary", num_kv_heads=2, position_options=options)
    prompt, mask = left_padded([random_tokens(1, length, seed=length)[0] for length in (60, 20)], filler=3)
    assert_same_logits(*both(model, prompt, random_tokens(2, 3, seed=1), key_padding_mask=mask))


@pytest.mark.slow
def test_every_part_of_attention() -> None:
    """Norms of heads, gates of outputs, keys and values shifted by a token; and from the very first token on."""
    for position in ("alibi", "fox"):
        model = language_model(position, num_kv_heads=2, **FOX_PRO)
        assert_same_logits(*both(model, random_tokens(2, 60), random_tokens(2, 3, seed=1)))
        assert_same_logits(*both(model, random_tokens(2, 0), random_tokens(2, 3, seed=1)))


def test_windows_are_found_on_the_device() -> None:
    """Values far away that no head can see any more may be anything."""
    model = language_model(num_heads=2, position_options={"slopes": [0.5, 0.9]})
    prompt, later = random_tokens(1, 900), random_tokens(1, 2, seed=1)
    cache = model.make_cache(1, 1000)
    with torch.no_grad():
        expected = model(torch.cat((prompt, later), dim=1))[:, -2:]
        model(prompt, cache=cache)
    for values in cache.values:
        values[:, :, :64] = math.nan
    cache.begin_steps()
    assert_same_logits(steps(model, cache, later), expected)


def test_one_token_at_a_time() -> None:
    model = language_model()
    cache = model.make_cache(1, 50)
    cache.begin_steps()
    with pytest.raises(ValueError, match="one token at a time, got 2"):
        model(random_tokens(1, 2), cache=cache)


def test_a_cache_grows_between_steps() -> None:
    model, prompt, later = language_model(), random_tokens(1, 255), random_tokens(1, 3, seed=1)
    cache = model.make_cache(1)
    with torch.no_grad():
        expected = model(torch.cat((prompt, later), dim=1))[:, -3:]
        model(prompt, cache=cache)
    cache.begin_steps()
    assert_same_logits(steps(model, cache, later), expected)
    assert cache.capacity > 256


# Whole generation, with a graph that is none


class FakeGraph:
    """Stands for a CUDA graph on a CPU. Capturing computes nothing: what it changes is put back. A replay does."""

    step: Step
    made: ClassVar[list[FakeGraph]] = []

    def __init__(self) -> None:
        self.replays = 0
        self.alive = True
        self.made.append(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generator = generator

    def _state(self) -> list[Tensor]:
        cache, sampling = self.step.cache, self.step.sampling
        assert cache.sequences is not None
        kept = [*cache.keys, *cache.values, *cache.norms, cache.sequences, self.step.token, self.step.going]
        return [*kept, sampling.ended]

    def _generator(self) -> torch.Generator:
        return self.step.sampling.generator or torch.default_generator

    def capture_begin(self, capture_error_mode: str) -> None:
        self.before = [tensor.clone() for tensor in self._state()]
        self.random = self._generator().get_state()
        self.places = [tensor.data_ptr() for tensor in self._state()]

    def capture_end(self) -> None:
        for tensor, before in zip(self._state(), self.before, strict=True):
            tensor.copy_(before)
        self._generator().set_state(self.random)

    def replay(self) -> None:
        assert self.alive
        assert self.places == [tensor.data_ptr() for tensor in self._state()], "a replay would write elsewhere"
        length = self.step.cache.length
        self.step.run()
        self.step.cache.length = length  # a graph knows nothing of Python's numbers
        self.replays += 1

    def reset(self) -> None:
        self.alive = False


class Anything:
    """An object whose methods do nothing: a stream, an event."""

    def __init__(self, *arguments: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


class Quiet:
    """An object of the real torch.cuda but for what needs a GPU."""

    CUDAGraph, Event, Stream = FakeGraph, Anything, Anything
    default_generators = (torch.default_generator,)
    current_stream = Anything
    stream = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)


REAL = torch.cuda


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeGraph]]:
    """`generate` takes its way for a GPU on a CPU."""
    init = Step.__init__

    def keep(self: Step, *arguments: Any) -> None:
        init(self, *arguments)
        FakeGraph.step = self

    monkeypatch.setattr(Step, "__init__", keep)
    monkeypatch.setattr(torch, "cuda", Quiet())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(module, "why_not_graphed", lambda model, cache: None)
    monkeypatch.setattr(stepping, "_stream_of", Anything)
    FakeGraph.made = []
    yield FakeGraph
    FakeGraph.made = []


def tiny(position: str = "alibi") -> ts.LanguageModel:
    return language_model(position, num_layers=1, num_heads=2, d_model=16)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "rotary"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 3.0, "seed": 3},
        {"temperature": 3.0, "seed": 3, "top_k": 9, "top_p": 0.8},
    ],
    ids=str,
)
def test_tokens_are_those_of_eager_calls(pretending: type[FakeGraph], options: dict[str, Any], position: str) -> None:
    model, (prompt, mask) = tiny(position), left_padded([random_tokens(1, n, seed=n)[0] for n in (30, 20)])
    options = {"max_new_tokens": 11, "key_padding_mask": mask, **options}
    expected = model.generate(prompt, cuda_graph=False, **options)
    columns: list[Tensor] = []
    found = model.generate(prompt, on_token=lambda column: columns.append(column.clone()), **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(columns, dim=1), expected[:, 30:])
    assert [graph.replays for graph in pretending.made] == [9]  # the first token is the prompt's, the second runs
    assert not pretending.made[0].alive


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_few_tokens(pretending: type[FakeGraph], count: int) -> None:
    model, prompt = tiny(), random_tokens(1, 20)
    expected = model.generate(prompt, max_new_tokens=count, temperature=0.0, cuda_graph=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=count, temperature=0.0), expected)
    assert len(pretending.made) == (count > 2)


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("limit", [10, None])
def test_it_ends_where_eager_calls_end(pretending: type[FakeGraph], limit: int | None, at: int) -> None:
    model, prompt = tiny(), random_tokens(2, 20)
    options: dict[str, Any] = {"temperature": 4.0, "seed": 5}
    free = model.generate(prompt, max_new_tokens=10, cuda_graph=False, **options)
    options["stop_tokens"] = [int(free[0, 20 + at]), int(free[1, 20 + at // 2])]
    expected = model.generate(prompt, max_new_tokens=200, cuda_graph=False, **options)[:, : 30 if limit else None]
    columns: list[Tensor] = []
    collect = lambda column: columns.append(column.clone())  # noqa: E731
    found = model.generate(prompt, max_new_tokens=limit, on_token=collect, **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(columns, dim=1), expected[:, 20:])


@pytest.mark.slow
def test_a_cache_that_grows_is_captured_again(pretending: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", 3)
    model, prompt = tiny(), random_tokens(1, 507)
    expected = model.generate(prompt, max_new_tokens=14, temperature=0.0, cuda_graph=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=14, temperature=0.0), expected)
    assert len(pretending.made) > 1
    assert not any(graph.alive for graph in pretending.made)


@pytest.mark.slow
def test_an_error_of_on_token_leaves_all_in_order(pretending: type[FakeGraph]) -> None:
    model, prompt = tiny().train(), random_tokens(1, 20)
    columns: list[Tensor] = []

    def stop(column: Tensor) -> None:
        columns.append(column)
        if len(columns) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, max_new_tokens=20, on_token=stop)
    assert model.training
    assert not pretending.made[0].alive


def test_what_cannot_be_captured(pretending: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without a graph, or raises if one is asked for."""
    model, prompt = tiny(), random_tokens(1, 20)

    def refuse(self: FakeGraph, **options: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(FakeGraph, "capture_begin", refuse)
    expected = model.generate(prompt, max_new_tokens=8, temperature=2.0, seed=1, cuda_graph=False)
    monkeypatch.setattr(stepping, "_set_back", lambda generators, states: None)  # those of a CPU cannot
    with pytest.warns(UserWarning, match="without CUDA graphs: the model cannot be captured: operation not permit"):
        found = model.generate(prompt, max_new_tokens=8, temperature=2.0, seed=1)
    assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        model.generate(prompt, max_new_tokens=8, cuda_graph=True)
