"""torch.compile takes a whole model as one graph: in training, and a decoding step with a cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens, small_config
from trainshort.models import loss as module

# All position methods, of which a quick run takes one with a bias and one without.
OTHERS = [name for name in EVERY_POSITION if name not in ("alibi", "rotary")]
SLOW_BUT_TWO = ["alibi", "rotary", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def loss_and_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    value = loss()
    return [value.detach(), *torch.autograd.grad(value, list(model.parameters()))]


def assert_compiled_loss_equals_eager(
    model: Any, *inputs: Tensor, backend: str = "aot_eager", **options: Any
) -> None:
    compiled = torch.compile(model.loss, fullgraph=True, backend=backend)
    assert_same_loss_and_gradients(model, compiled, *inputs, **options)


def assert_same_loss_and_gradients(model: Any, compiled: Any, *inputs: Tensor, **options: Any) -> None:
    eager = loss_and_gradients(model, lambda: model.loss(*inputs, **options))
    found = loss_and_gradients(model, lambda: compiled(*inputs, **options))
    for one, two in zip(found, eager, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * two.abs().max().item())


# Training


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_training(position: str) -> None:
    """At changing lengths: the first has a graph of its own, then one serves all of them but 1."""
    model = language_model(position).train()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    for length in (150, 97, 1):
        inputs = random_tokens(2, length), random_tokens(2, length, seed=1)
        assert_same_loss_and_gradients(model, compiled, *inputs)


@QUIET
@pytest.mark.slow
def test_training_with_inductor() -> None:
    model = language_model(num_kv_heads=2, gated=True, position_options={"trainable": True}).train()
    inputs = random_tokens(2, 150), random_tokens(2, 150, seed=1)
    assert_compiled_loss_equals_eager(model, *inputs, backend="inductor")


@pytest.mark.slow
def test_training_on_packed_documents() -> None:
    inputs = random_tokens(1, 200), random_tokens(1, 200, seed=1)
    borders = torch.tensor([0, 90, 131, 200])
    assert_compiled_loss_equals_eager(language_model("rotary"), *inputs, cu_seqlens=borders)


def test_training_on_padded_rows() -> None:
    mask = torch.arange(60)[None] >= torch.tensor([0, 21])[:, None]
    inputs = random_tokens(2, 60), random_tokens(2, 60, seed=1).masked_fill(~mask, -100)
    assert_compiled_loss_equals_eager(language_model(), *inputs, key_padding_mask=mask)


def test_training_with_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss in chunks is one graph too."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 61 * 40)
    assert_compiled_loss_equals_eager(language_model(), random_tokens(2, 50), random_tokens(2, 50, seed=1))


# Blocks alone


# Torch's own, of inputs that are no leaves: shown to nobody, but an error in tests.
OF_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Counted:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


@OF_GRAD
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_one_graph_for_all_layers(position: str) -> None:
    """Nothing else compiles: not another pass, not evaluation, not generation."""
    model, counted = language_model(position, num_layers=5, max_length=200).train(), Counted()
    inputs = random_tokens(2, 150), random_tokens(2, 150, seed=1)
    expected = loss_and_gradients(model, lambda: model.loss(*inputs))
    text = model.generate(inputs[0][:, :20], max_new_tokens=5, temperature=0.0)
    model.compile_blocks(backend=counted)
    for _ in range(2):
        found = loss_and_gradients(model, lambda: model.loss(*inputs))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * two.abs().max().item())
    assert len(counted.graphs) == 1
    with torch.no_grad():
        model.eval().loss(*(each[:1, :77] for each in inputs))
    assert torch.equal(model.generate(inputs[0][:, :20], max_new_tokens=5, temperature=0.0), text)
    loss_and_gradients(model.train(), lambda: model.loss(*inputs))
    assert len(counted.graphs) == 1


@pytest.mark.slow
@OF_GRAD
def test_blocks_of_many_models() -> None:
    """More than torch compiles of one function."""
    counted = Counted()
    for number in range(1, 12):
        model, tokens = language_model(d_ff=8 * number).train(), random_tokens(1, 30)
        model.compile_blocks(backend=counted)
        model.loss(tokens, tokens).backward()
    assert len(counted.graphs) == 11


@pytest.mark.slow
@OF_GRAD
def test_a_model_with_compiled_blocks_can_be_copied_pickled_and_compiled_whole() -> None:
    model, tokens = language_model().train(), random_tokens(2, 30)
    model.compile_blocks(backend="aot_eager")
    expected = loss_and_gradients(model, lambda: model.loss(tokens, tokens))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loss_and_gradients(other, lambda m=other: m.loss(tokens, tokens)), expected)
    assert_compiled_loss_equals_eager(model, tokens, tokens)
    assert model.state_dict().keys() == language_model().state_dict().keys()


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_one_graph_for_all_lengths(position: str) -> None:
    graphs = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = language_model(position).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for length in (100, 257, 300, 2, 640):
        tokens = random_tokens(1, length)
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_encoder() -> None:
    model, tokens = encoder(), random_tokens(2, 140)
    mask = torch.arange(140)[None] < torch.tensor([140, 77])[:, None]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, mask), model(tokens, mask), rtol=1e-5, atol=1e-5)


def test_training_an_encoder() -> None:
    targets = random_tokens(2, 60, seed=1)
    targets[random_tokens(2, 60, seed=2) > 12] = -100
    assert_compiled_loss_equals_eager(encoder(), random_tokens(2, 60), targets)


def test_alibi_transformer() -> None:
    model = ts.ALiBiTransformer(ts.ALiBiConfig(num_layers=2, d_model=48, num_heads=3, dropout=0.0))
    x = torch.randn(2, 140, 48, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager = loss_and_gradients(model, lambda: model(x).square().sum())
    for one, two in zip(loss_and_gradients(model, lambda: compiled(x).square().sum()), eager, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * two.abs().max().item())


# Decoding


def decode(
    position: str, *, backend: Any = "aot_eager", padded: bool = False, capacity: int | None = 300, **options: Any
) -> None:
    """Twenty steps across a border of blocks, compiled and eager, each with a cache of its own."""
    model = language_model(position).requires_grad_(False)
    tokens = random_tokens(2, 140)
    mask = torch.arange(120)[None] >= torch.tensor([0, 33])[:, None] if padded else None
    caches = [model.make_cache(2, capacity) for _ in range(2)]
    for cache in caches:
        model(tokens[:, :120], cache=cache, key_padding_mask=mask)
    step = torch.compile(model, fullgraph=True, backend=backend, **options)
    for place in range(120, 140):
        token = tokens[:, place : place + 1]
        expected, found = model(token, cache=caches[0]), step(token, cache=caches[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [cache.length for cache in caches] == [140, 140]
    for name in ("keys", "values"):
        for one, two in zip(getattr(caches[1], name), getattr(caches[0], name), strict=True):
            torch.testing.assert_close(one[:, :, :140], two[:, :, :140], rtol=1e-4, atol=1e-4)
    for one, two in zip(caches[1].norms, caches[0].norms, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_decoding_step(position: str) -> None:
    decode(position)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "none"])
def test_a_decoding_step_of_padded_rows_in_a_growing_cache(position: str) -> None:
    decode(position, padded=True, capacity=None)


@pytest.mark.slow
@pytest.mark.parametrize("position", SLOW_BUT_TWO)
def test_a_decoding_step_compiled_for_all_lengths_at_once(position: str) -> None:
    decode(position, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_decoding_is_compiled_a_few_times_and_not_every_step(position: str) -> None:
    graphs = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    decode(position, backend=count)
    assert len(graphs) <= 3


@pytest.mark.slow
@QUIET
def test_a_compiled_cache_bounds_the_keys_of_every_block() -> None:
    """Norms written into the wrong block bound nothing: keys would be skipped that matter."""
    cache = ts.KeyValueCache(small_config(num_layers=1), 1, 400)

    def append(k: Tensor) -> None:
        cache.append(0, k, k)
        cache.advance(k.shape[2])

    compiled = torch.compile(append, fullgraph=True)
    rows = torch.randn(1, 4, 400, 8, generator=torch.Generator().manual_seed(0))
    append(rows[:, :, :120])
    for place in range(120, 262):
        compiled(rows[:, :, place : place + 1])
    written = rows[:, :, :262].norm(dim=-1)
    expected = torch.stack([part.amax(-1) for part in written.split(128, dim=-1)], dim=-1)
    torch.testing.assert_close(cache.norms[0][..., :3], expected)


@QUIET
@pytest.mark.slow
def test_a_decoding_step_with_inductor() -> None:
    decode("alibi", backend="inductor")


@pytest.mark.parametrize("compiled", ["in place", "wrapped", "blocks"])
def test_generating_runs_what_was_written(compiled: str) -> None:
    """A text has many lengths: compiled code would be compiled again and again."""
    model, tokens = language_model(), random_tokens(2, 30)
    expected = model.generate(tokens, max_new_tokens=6, temperature=0.0)
    calls: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    if compiled == "in place":
        model.compile(backend=backend)
    elif compiled == "blocks":
        for block in model.trunk.blocks:
            block.compile(backend=backend)
    generating = torch.compile(model, backend=backend) if compiled == "wrapped" else model
    assert torch.equal(generating.generate(tokens, max_new_tokens=6, temperature=0.0), expected)
    assert not calls
    with torch.no_grad():
        generating(tokens)
    assert calls, "otherwise this shows nothing"
