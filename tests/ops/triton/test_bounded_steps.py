"""Generation over a bounded cache in steps that are replayed: the tokens of a full cache, through reruns too.

What CUDA graphs replay, run here without one: the kernels in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import language_model, left_padded, random_tokens
from tests.models.test_bounded import STARTLING, startling_model, startling_text
from tests.ops.triton.test_stepping import FakeGraph, pretending  # noqa: F401  a fixture
from trainshort.models import bounded_keys, ring_sizes
from trainshort.models.bounded import BoundedCache
from trainshort.models.sampling import Sampling


@pytest.fixture
def graphs(pretending: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:  # noqa: F811
    """`generate` takes its way for a GPU on a CPU, with small rings."""

    def state(self: FakeGraph) -> list[Tensor]:
        cache = self.step.cache
        assert isinstance(cache, BoundedCache)
        return [*cache.held.tensors(), cache.text, self.step.token, self.step.going, self.step.sampling.ended]

    monkeypatch.setattr(FakeGraph, "_state", state)
    monkeypatch.setattr(bounded_keys, "FIRST_CAPACITY", 32)
    monkeypatch.setattr(bounded_keys, "SETTLE", 96)
    for module in (bounded_keys, ring_sizes):
        monkeypatch.setattr(module, "BLOCK", 8)
    return pretending


STEEP: dict[str, Any] = {"position_options": {"slopes": [0.9, 0.4]}}
THRESHOLD = 2.0


def tiny(**changes: Any) -> ts.LanguageModel:
    return language_model(**({"num_layers": 1, "num_heads": 2, "d_model": 16} | STEEP | changes))


def test_tokens_are_those_of_a_full_cache(graphs: type[FakeGraph]) -> None:
    """While rings grow, settle and evict: graphs are captured anew a few times."""
    model, (prompt, mask) = tiny(num_kv_heads=1), left_padded([random_tokens(1, n, seed=n)[0] for n in (90, 20)])
    options = {"max_new_tokens": 24, "key_padding_mask": mask, "temperature": 3.0, "seed": 3}
    expected = model.generate(prompt, cuda_graph=False, **options)
    assert torch.equal(model.generate(prompt, bounded=True, **options), expected)
    assert 1 < len(graphs.made) < 8
    assert sum(graph.replays for graph in graphs.made) > 10


@pytest.mark.slow
def test_steps_whose_certificates_fail_are_taken_back(
    graphs: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The startling token comes as a choice of the model's, a few steps after the prompt."""
    model, prompt = startling_model(), startling_text(320)[:, :300]
    choose = Sampling._choose

    def startle(self: Sampling, logits: Tensor) -> Tensor:
        """By what the text says, not by a count of calls: steps may be taken back."""
        return torch.where(logits[:, 7] > THRESHOLD, STARTLING, choose(self, logits) % 20)

    monkeypatch.setattr(Sampling, "_choose", startle)
    caches: list[BoundedCache] = []
    make = model.make_cache

    def keep(*arguments: Any, **changes: Any) -> Any:
        cache = make(*arguments, **changes)
        if isinstance(cache, BoundedCache):
            cache.sizes.tolerance = 1e-4
            caches.append(cache)
        return cache

    monkeypatch.setattr(model, "make_cache", keep)
    options = {"max_new_tokens": 12, "temperature": 3.0, "seed": 3}
    expected = model.generate(prompt, cuda_graph=False, **options)
    assert STARTLING in expected[0, 301:308].tolist()
    columns: list[Tensor] = []
    found = model.generate(prompt, bounded=True, on_token=lambda column: columns.append(column.clone()), **options)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(columns, dim=1), expected[:, 300:])
    assert caches[-1].report().reruns > 0
