"""Texts that a patched model of transformers generates: those of the unpatched one, with every cache and strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts

pytest.importorskip("transformers")

import transformers

from tests.integrations.stock import FAMILIES, MODELS, padded, patched_like, tokens_of
from tests.models.public.native import VOCABULARY

pytestmark = pytest.mark.transformers
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam_sampling": {"do_sample": True, "num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


def texts(model: Any, length: int = 30, new: int = 12, batch: int = 2, **options: Any) -> Tensor:
    """After a prompt with left padding, or a single row without."""
    tokens, mask = padded("left", length)
    if "prompt_lookup_num_tokens" in options or "assistant_model" in options or batch == 1:
        tokens, mask = tokens[:1], mask[:1]
    torch.manual_seed(5)
    return model.generate(tokens, attention_mask=mask.long(), max_new_tokens=new, use_cache=True, **options)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    stock = MODELS[request.param]()
    return stock, patched_like(stock)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_texts(pair: tuple[Any, Any], strategy: str) -> None:
    stock, patched = pair
    options = STRATEGIES[strategy]
    assert torch.equal(texts(patched, **options), texts(stock, **options))


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beams"])
def test_texts_with_a_static_cache(pair: tuple[Any, Any], strategy: str) -> None:
    """Against the unpatched model with a dynamic cache: Falcon's own fails with a static one."""
    stock, patched = pair
    options = STRATEGIES[strategy]
    found = texts(patched, cache_implementation="static", **options)
    assert torch.equal(found, texts(stock, **options))
    assert torch.equal(texts(patched, cache_implementation="static", **options), found)  # the same cache, reset


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding(family: str) -> None:
    """Several tokens after a cache at once, of which some are taken back."""
    stock = FAMILIES[family]()
    stock.generation_config.pad_token_id = VOCABULARY  # no token of the text, which would count as padding
    patched, assistant = patched_like(stock), patched_like(stock)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    expected = texts(stock, new=25, batch=1, do_sample=False)
    assert torch.equal(texts(patched, new=25, do_sample=False, assistant_model=assistant), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_mpt_beyond_its_configured_length(cache: str) -> None:
    stock = FAMILIES["mpt"]()
    patched = patched_like(stock)
    stock.config.max_seq_len = 512
    options = {"length": 150, "do_sample": False}
    with pytest.raises(RuntimeError, match="must match"):
        texts(FAMILIES["mpt"](), **options)
    assert torch.equal(texts(patched, cache_implementation=cache, **options), texts(stock, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_quantities_of_a_cache_change_between_calls(family: str) -> None:
    """Rows are repeated and selected, tokens cropped, in the middle of a text."""
    patched = ts.patch(FAMILIES[family]())
    tokens = tokens_of(2, 40)
    past = transformers.DynamicCache(config=patched.config)
    with torch.no_grad():
        patched(tokens[:, :30], past_key_values=past, use_cache=True)
        patched(tokens[:, 30:31], past_key_values=past, use_cache=True)
        past.batch_repeat_interleave(2)
        rows = tokens.repeat_interleave(2, dim=0)
        patched(rows[:, 31:35], past_key_values=past, use_cache=True)
        past.crop(-3)
        patched(rows[:, 32:36], past_key_values=past, use_cache=True)
        chosen = torch.tensor([3, 0, 3])
        past.batch_select_indices(chosen)
        rows = rows[chosen]
        found = patched(rows[:, 36:], past_key_values=past, use_cache=True).logits
        expected = patched(rows).logits[:, 36:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "default", "error:::trainshort"
)  # torch's compiler uses parts of torch that it deprecates
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("name", ["bloom-6", "mpt-8", "falcon-6-multi_query", "falcon-6-grouped", "bloom-6 inductor"])
def test_compiled_generation(name: str, padding: bool) -> None:
    """The graph is compiled once, whole, and used again by the next text."""
    name, _, inductor = name.partition(" ")
    patched = ts.patch(MODELS[name]())
    compiling = transformers.CompileConfig(fullgraph=True, mode=None, backend=inductor or "aot_eager")
    compiling._compile_all_devices = True
    options = {"batch": 2 if padding else 1, "do_sample": False, "length": 100, "new": 40}  # over a block's end
    expected = texts(patched, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = texts(patched, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    again = texts(patched, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(again, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
