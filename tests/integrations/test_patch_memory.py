"""Nothing of length x length is made by a patched model, in front of attention, in it or behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainshort as ts

pytest.importorskip("transformers")

from tests.integrations.stock import MODELS, padded, tokens_of
from trainshort.ops import operators

pytestmark = pytest.mark.transformers
LENGTH = 600
BODIES = {
    operator._opoverload: operator._init_fn for operator in (operators.blocked_op, operators.blocked_backward_op)
}


class NothingQuadratic(TorchDispatchMode):
    """Fails on every tensor with two dimensions of LENGTH or more; looks into this package's operators too."""

    bodies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BODIES:
            self.bodies += 1
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and sum(size >= LENGTH for size in tensor.shape) > 1:
                raise AssertionError(f"{func} made {list(tensor.shape)}")
        return result


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """A dispatch mode is seen by its own thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name: str) -> None:
    model = ts.patch(MODELS[name]()).train()
    for mask in (None, padded("left", LENGTH)[1], padded("right", LENGTH)[1]):
        with NothingQuadratic() as mode:
            model(tokens_of(2, LENGTH), attention_mask=mask).logits.square().sum().backward()
        assert mode.bodies == 4, "two layers, there and back"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["bloom-6", "mpt-8", "falcon-6-grouped"])
def test_generation(name: str, cache: str) -> None:
    model = ts.patch(MODELS[name]())
    tokens, mask = padded("left", LENGTH)
    with NothingQuadratic() as mode:
        model.generate(
            tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=cache, use_cache=True
        )
    assert mode.bodies >= 2


@pytest.mark.parametrize("name", ["bloom-6", "mpt-8", "falcon-8"])
def test_the_unpatched_model_fails_this(name: str) -> None:
    model = MODELS[name]()
    if name == "mpt-8":
        model.config.max_seq_len = LENGTH
    with pytest.raises(AssertionError, match="600, 600"), NothingQuadratic():
        model(tokens_of(1, LENGTH))
