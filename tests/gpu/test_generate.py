"""Generation on the GPU: tokens from a replayed CUDA graph are those of eager calls, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import STEPPING_POSITIONS, language_model, left_padded, random_tokens
from trainshort.models import generate as module
from trainshort.models import stepping
from trainshort.positions import POSITIONS, Position

pytestmark = pytest.mark.filterwarnings("error:generate runs without:UserWarning")

SAMPLED: dict[str, Any] = {"temperature": 3.0, "seed": 7, "top_k": 20, "top_p": 0.9}


def model_of(position: str = "alibi", **changes: Any) -> ts.LanguageModel:
    return language_model(position, **changes).cuda()


def both(model: ts.LanguageModel, prompt: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens with and without a graph, and every column of the first as it was streamed."""
    columns: list[Tensor] = []
    with_graph = model.generate(
        prompt, cuda_graph=True, on_token=lambda column: columns.append(column.clone()), **options
    )
    assert torch.equal(torch.stack(columns, dim=1), with_graph[:, prompt.shape[1] :])
    return with_graph, model.generate(prompt, cuda_graph=False, **options)


@pytest.mark.parametrize("position", STEPPING_POSITIONS)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_eager_calls(position: str, options: dict[str, Any]) -> None:
    found, expected = both(model_of(position), random_tokens(2, 300).cuda(), max_new_tokens=40, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("position", STEPPING_POSITIONS)
def test_tokens_are_those_of_the_cpu(position: str) -> None:
    model, prompt = language_model(position), random_tokens(2, 300)
    expected = model.generate(prompt, max_new_tokens=30, temperature=0.0)
    found = model.cuda().generate(prompt.cuda(), max_new_tokens=30, temperature=0.0, cuda_graph=True)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("position", STEPPING_POSITIONS)
def test_left_padded_rows(position: str) -> None:
    rows = [random_tokens(1, length, seed=length)[0] for length in (300, 131, 1)]
    prompt, mask = (tensor.cuda() for tensor in left_padded(rows, filler=5))
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0}
    model = model_of(position)
    found, expected = both(model, prompt, key_padding_mask=mask, **options)
    assert torch.equal(found, expected)
    for index, row in enumerate(rows):
        alone = model.generate(row[None].cuda(), **options)[0]
        assert torch.equal(found[index, -len(row) - 20 :], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("position", ["alibi", "rotary", "t5"])
def test_half_precision_with_grouped_queries(position: str, dtype: torch.dtype) -> None:
    """Greedy tokens may part where two are equally likely in 16 bits: the first must not, in most rows."""
    model = model_of(position, dtype=dtype, num_kv_heads=2)
    found, expected = both(model, random_tokens(8, 200).cuda(), max_new_tokens=4, temperature=0.0)
    assert (found == expected).all(-1).float().mean().item() >= 0.75


def test_a_seed_repeats_and_leaves_the_global_generator_alone() -> None:
    model, prompt = model_of(), random_tokens(2, 50).cuda()
    torch.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    first = model.generate(prompt, max_new_tokens=30, cuda_graph=True, **SAMPLED)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.equal(model.generate(prompt, max_new_tokens=30, cuda_graph=True, **SAMPLED), first)
    other = model.generate(prompt, max_new_tokens=30, cuda_graph=True, **SAMPLED | {"seed": 8})
    assert not torch.equal(other, first)


def test_without_a_seed_the_global_generator_decides() -> None:
    model, prompt = model_of(), random_tokens(2, 50).cuda()
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 3.0, "cuda_graph": True}
    torch.manual_seed(5)
    first = model.generate(prompt, **options)
    assert not torch.equal(model.generate(prompt, **options), first)
    torch.manual_seed(5)
    assert torch.equal(model.generate(prompt, **options), first)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 8, 17])
@pytest.mark.parametrize("limit", [20, None])
def test_it_ends_where_eager_calls_end(at: int, limit: int | None) -> None:
    model, prompt = model_of(), random_tokens(2, 50).cuda()
    free = model.generate(prompt, max_new_tokens=20, cuda_graph=False, **SAMPLED)
    stops = [int(free[0, 50 + at]), int(free[1, 50 + at // 2])]
    found, expected = both(model, prompt, max_new_tokens=limit, stop_tokens=stops, **SAMPLED)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("position", ["alibi", "rotary"])
def test_a_cache_that_grows_is_captured_again(monkeypatch: pytest.MonkeyPatch, position: str) -> None:
    captures = []
    capture = stepping.GraphedSteps._capture

    def count(self: stepping.GraphedSteps) -> Any:
        captures.append(self.step.cache.capacity)
        return capture(self)

    monkeypatch.setattr(stepping.GraphedSteps, "_capture", count)
    monkeypatch.setattr(module, "ROOM", 3)
    found, expected = both(model_of(position), random_tokens(1, 500).cuda(), max_new_tokens=40, temperature=0.0)
    assert torch.equal(found, expected)
    assert len(captures) > 1


@pytest.mark.parametrize("compiled", ["in place", "wrapped", "blocks"])
def test_compiled_models(compiled: str) -> None:
    model, prompt = model_of(), random_tokens(2, 50).cuda()
    expected = model.generate(prompt, max_new_tokens=12, temperature=0.0, cuda_graph=False)
    if compiled == "in place":
        model.compile()
    elif compiled == "blocks":
        for block in model.trunk.blocks:
            block.compile()
    generating = torch.compile(model) if compiled == "wrapped" else model
    assert torch.equal(generating.generate(prompt, max_new_tokens=12, temperature=0.0, cuda_graph=True), expected)


def test_a_model_trained_further_gives_other_tokens() -> None:
    """A graph is of one call: it never outlives a change of the weights."""
    model, prompt = model_of(), random_tokens(1, 50).cuda()
    before = model.generate(prompt, max_new_tokens=12, temperature=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    found, expected = both(model, prompt, max_new_tokens=12, temperature=0.0)
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("rotary"), random_tokens(2, 1000).cuda()
    assert module.piece_of(model, 2) == module.PREFILL_ON_GPU // 2
    expected = model.generate(prompt, max_new_tokens=5, temperature=0.0)
    monkeypatch.setattr(module, "piece_of", lambda model, batch: 300)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, temperature=0.0), expected)


class Waits(Position):
    """Reads a number back from the GPU, which a graph cannot."""

    def __init__(self, shape: Any) -> None:
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + float(positions.sum().item() >= 0)


def test_what_cannot_be_captured_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POSITIONS, "waits", Waits)
    model, prompt = model_of("waits"), random_tokens(2, 50).cuda()
    for options in ({"temperature": 0.0}, SAMPLED):
        expected = model.generate(prompt, max_new_tokens=12, cuda_graph=False, **options)
        with pytest.warns(UserWarning, match="generate runs without CUDA graphs: the model cannot be captured"):
            assert torch.equal(model.generate(prompt, max_new_tokens=12, **options), expected)
        with pytest.raises(RuntimeError):
            model.generate(prompt, max_new_tokens=12, cuda_graph=True, **options)
    torch.rand(3, device="cuda")  # the global generator is in order
    found, expected = both(model_of(), prompt, max_new_tokens=12, **SAMPLED)
    assert torch.equal(found, expected)


def test_reasons() -> None:
    prompt = random_tokens(1, 20).cuda()
    hooked = model_of()
    hooked.trunk.blocks[0].register_forward_hook(lambda *arguments: None)
    cases = {
        "float64": model_of(dtype=torch.float64),
        "head_dim of at most 256": model_of(head_dim=260),
        "forward hooks": hooked,
    }
    for reason, model in cases.items():
        with pytest.warns(UserWarning, match=f"generate runs without CUDA graphs: .*{reason}"):
            assert model.generate(prompt, max_new_tokens=3).shape == (1, 23)
        with pytest.raises(RuntimeError, match=reason):
            model.generate(prompt, max_new_tokens=3, cuda_graph=True)
    with torch.autocast("cuda", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        model_of().generate(prompt, max_new_tokens=3)


def test_an_error_of_on_token_leaves_all_in_order() -> None:
    model, prompt = model_of().train(), random_tokens(2, 50).cuda()
    columns: list[Tensor] = []

    def stop(column: Tensor) -> None:
        columns.append(column.clone())
        if len(columns) == 13:
            raise KeyboardInterrupt

    expected = model.generate(prompt, max_new_tokens=13, **SAMPLED)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, max_new_tokens=None, on_token=stop, **SAMPLED)
    assert torch.equal(torch.stack(columns, dim=1), expected[:, 50:])
    assert model.training
    assert torch.equal(model.generate(prompt, max_new_tokens=13, **SAMPLED), expected)


@pytest.mark.parametrize("row", [[1, 1, 1, 0], [0, 0, 0, 0]], ids=str)
def test_padding_that_is_not_on_the_left_is_refused(row: list[int]) -> None:
    mask = torch.tensor([[0, 0, 1, 1], row]).bool().cuda()
    with pytest.raises(ValueError, match=r"padded on the left: .* row 1 is not so"):
        model_of().generate(random_tokens(2, 4).cuda(), max_new_tokens=3, key_padding_mask=mask)


def test_columns_are_no_part_of_the_text() -> None:
    model, prompt = model_of(), random_tokens(2, 50).cuda()
    expected = model.generate(prompt, max_new_tokens=30, **SAMPLED)
    out = model.generate(prompt, max_new_tokens=30, on_token=lambda column: column.zero_(), **SAMPLED)
    assert torch.equal(out, expected)


def test_columns_come_at_most_a_few_steps_late(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of(), random_tokens(1, 50).cuda()
    taken: list[stepping.GraphedSteps] = []
    init = stepping.GraphedSteps.__init__

    def keep(self: stepping.GraphedSteps, *arguments: Any) -> None:
        init(self, *arguments)
        taken.append(self)

    monkeypatch.setattr(stepping.GraphedSteps, "__init__", keep)
    late: list[int] = []
    given: list[Tensor] = []

    def look(column: Tensor) -> None:
        given.append(column)
        if taken:
            late.append(1 + taken[0].taken - len(given))

    model.generate(prompt, max_new_tokens=60, on_token=look)
    assert len(given) == 60
    assert min(late) >= 0
    assert max(late) <= 2 * stepping.AT_ONCE


def test_memory_is_given_back() -> None:
    """Graphs have memory of their own: none of it stays, however often a text is continued."""
    model, prompt = model_of(num_layers=4, d_model=256), random_tokens(4, 500).cuda()
    used = []
    for _ in range(6):
        model.generate(prompt, max_new_tokens=10, **SAMPLED)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[-1] == used[1]


def test_two_models_take_turns() -> None:
    """Inside a callback of the one, the other generates."""
    outer, inner = model_of(), model_of("rotary")
    prompt = random_tokens(1, 50).cuda()
    alone = [copy.deepcopy(model).generate(prompt, max_new_tokens=12, temperature=0.0) for model in (outer, inner)]
    found: list[Tensor] = []

    def nested(column: Tensor) -> None:
        if len(found) < 2:
            found.append(inner.generate(prompt, max_new_tokens=12, temperature=0.0))

    assert torch.equal(outer.generate(prompt, max_new_tokens=12, temperature=0.0, on_token=nested), alone[0])
    assert all(torch.equal(each, alone[1]) for each in found)
