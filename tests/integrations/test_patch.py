"""A patched model of transformers against the same model unpatched: logits, gradients, dropout, padding."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import trainshort as ts

pytest.importorskip("transformers")

import transformers

from tests.integrations.stock import (
    FAMILIES,
    MODELS,
    assert_same,
    padded,
    patched_like,
    refuses,
    stock_logits,
    tokens_of,
)

pytestmark = pytest.mark.transformers
LONG = 300  # tokens: MPT's configs here say 64, and Falcon's biases are wrong beyond 256 without a float mask


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    stock = MODELS[request.param]()
    return stock, patched_like(stock)


@pytest.mark.parametrize("length", [1, 50, LONG])
def test_logits(pair: tuple[Any, Any], length: int) -> None:
    stock, patched = pair
    tokens = tokens_of(2, length)
    with torch.no_grad():
        expected = stock_logits(stock, tokens)
        assert_same(patched(tokens).logits, expected)
        assert_same(patched(tokens, attention_mask=torch.ones_like(tokens), use_cache=True).logits, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_padding(pair: tuple[Any, Any], side: str, dtype: torch.dtype) -> None:
    stock, patched = pair
    tokens, mask = padded(side, 60)
    with torch.no_grad():
        found = patched(tokens, attention_mask=mask.to(dtype)).logits
        assert_same(found[mask], stock_logits(stock, tokens, mask)[mask])
    assert bool(found.isfinite().all())


def test_gradients(pair: tuple[Any, Any]) -> None:
    stock, patched = pair
    tokens, mask = padded("left", LONG)
    weights = torch.randn(*tokens.shape, 61) * mask[..., None]
    (stock_logits(stock, tokens, mask) * weights).sum().backward()
    (patched(tokens, attention_mask=mask).logits * weights).sum().backward()
    parameters = dict(patched.named_parameters())
    for name, parameter in stock.named_parameters():
        assert_same(parameters[name].grad, parameter.grad, of=3e-5)
        parameters[name].grad = parameter.grad = None


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_of_rows_padded_on_the_left(family: str) -> None:
    """The first real token of a row has the label -100 too: what predicts it sees padding alone."""
    stock = FAMILIES[family]()
    patched, (tokens, mask) = patched_like(stock), padded("left", 60)
    labels = tokens.masked_fill(~mask, -100)
    labels[torch.arange(2), mask.long().argmax(1)] = -100
    expected = stock(tokens, attention_mask=mask.float(), labels=labels).loss
    found = patched(tokens, attention_mask=mask, labels=labels).loss
    assert_same(found.detach(), expected.detach())
    gradients = torch.autograd.grad(expected, stock.parameters()), torch.autograd.grad(found, patched.parameters())
    for one, other in zip(*gradients, strict=True):
        assert_same(other, one, of=3e-5)


@pytest.mark.parametrize("sizes", [[40, 1, 1, 8, 10], [1, 1, 58]], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_with_a_cache(pair: tuple[Any, Any], cache: str, sizes: list[int]) -> None:
    stock, patched = pair
    tokens, mask = padded("left", sum(sizes))
    if cache == "dynamic":
        past = transformers.DynamicCache(config=patched.config)
    else:
        past = transformers.StaticCache(config=patched.config, max_cache_len=200)
    found, end = [], 0
    with torch.no_grad():
        for size in sizes:
            begin, end = end, end + size
            part = patched(
                tokens[:, begin:end], attention_mask=mask[:, :end].long(), past_key_values=past, use_cache=True
            )
            found.append(part.logits)
        expected = stock_logits(stock, tokens, mask)
    assert_same(torch.cat(found, dim=1)[mask], expected[mask])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_padding_alone_is_finite(family: str) -> None:
    patched = ts.patch(FAMILIES[family]())
    mask = torch.ones((2, 20), dtype=torch.long)
    mask[1] = 0
    out = patched(tokens_of(2, 20), attention_mask=mask, labels=tokens_of(2, 20))
    out.loss.backward()
    assert bool(out.logits.isfinite().all())
    assert all(bool(each.grad.isfinite().all()) for each in patched.parameters())


@pytest.mark.parametrize("mask", [None, torch.ones(2, 0)], ids=["none", "empty"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_mask_in_a_static_cache(family: str, mask: Any) -> None:
    stock, tokens = FAMILIES[family](), tokens_of(2, 30)
    with torch.no_grad():
        expected, patched = stock_logits(stock, tokens), ts.patch(stock)
        past = transformers.StaticCache(config=patched.config, max_cache_len=64)
        options = {"past_key_values": past, "use_cache": True, "attention_mask": mask}
        found = [patched(part, **options).logits for part in tokens.split([20, 1, 9], dim=1)]
        assert_same(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_with_dropout(family: str, reentrant: bool) -> None:
    """The same weights are dropped when a block is computed again."""
    options = {"attention_dropout": 0.3, "hidden_dropout": 0.1} if family != "mpt" else {}
    patched, tokens = ts.patch(FAMILIES[family](**options)).train(), tokens_of(2, 50)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            patched.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        patched(tokens, labels=tokens).loss.backward()
        gradients.append([each.grad for each in patched.parameters()])
        patched.zero_grad(set_to_none=True)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(second, first)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_attention_dropout(family: str) -> None:
    """In training alone; on average it changes nothing."""
    attention = ts.patch(FAMILIES[family](attention_dropout=0.2)).transformer.h[0].self_attention
    hidden = torch.randn(2, 40, 48)
    arguments = (hidden, torch.zeros_like(hidden), None, None) if family == "bloom" else (hidden, None, None)
    with torch.no_grad():
        expected = attention(*arguments)[0]
        assert torch.equal(attention(*arguments)[0], expected)
        attention.train()
        drawn = torch.stack([attention(*arguments)[0] for _ in range(100)])
    assert not torch.equal(drawn[0], drawn[1])
    error, spread = (drawn.mean(0) - expected).square().mean(), (drawn - expected).square().mean()
    assert 0.5 < float(error / spread) * 100 < 2.0


@pytest.mark.parametrize("head", ["BloomModel", "BloomForSequenceClassification", "BloomForTokenClassification"])
def test_other_heads(head: str) -> None:
    config = transformers.BloomConfig(vocab_size=61, hidden_size=48, n_layer=2, n_head=6, pad_token_id=0)
    stock, tokens = getattr(transformers, head)(config).eval(), tokens_of(2, 50)
    with torch.no_grad():
        expected = stock(tokens)[0]
        assert_same(ts.patch(stock)(tokens)[0], expected)


def test_inputs_as_embeddings_and_hidden_states() -> None:
    stock = FAMILIES["mpt"]()
    embedded = torch.randn(2, 30, 48)
    with torch.no_grad():
        expected = stock(inputs_embeds=embedded, output_hidden_states=True).hidden_states
        found = ts.patch(stock)(inputs_embeds=embedded, output_hidden_states=True).hidden_states
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_and_autocast(family: str) -> None:
    """Within what bfloat16 loses."""
    stock, tokens = FAMILIES[family](), tokens_of(2, 60)
    with torch.no_grad():
        expected, patched = stock_logits(stock, tokens), ts.patch(stock)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = patched(tokens).logits.float()
        for found in (cast, patched.bfloat16()(tokens).logits.float()):
            assert float((found - expected).std() / expected.std()) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_computed_is_refused(family: str) -> None:
    patched, tokens = ts.patch(FAMILIES[family]()), tokens_of(1, 8)
    with refuses(ValueError, "output_attentions", "unpatch"):
        patched(tokens, output_attentions=True)
    with refuses(ValueError, "attention_mask", r"\[1, 1, 8, 8\]", "unpatch"):
        patched(tokens, attention_mask=torch.ones(1, 1, 8, 8))
    with refuses(ValueError, "attention_mask", "hole in row 0"):
        patched(tokens, attention_mask=torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]]))
    for rows in (1, 3):
        with refuses(ValueError, "attention_mask", f"row of the batch: 2; it has {rows}"):
            patched(tokens.expand(2, -1), attention_mask=torch.ones(rows, 8))
    for use_cache in (False, True):
        for wrong in (7, 9):
            with refuses(ValueError, "attention_mask", ": 8; it has", str(wrong)):
                patched(tokens, attention_mask=torch.ones(1, wrong), use_cache=use_cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_by_position_are_checked_too(family: str) -> None:
    base, tokens = ts.patch(FAMILIES[family]()).transformer, tokens_of(1, 8)
    names = list(inspect.signature(base.forward).parameters)
    for name, value in (("attention_mask", torch.ones(1, 1, 8, 8)), ("output_attentions", True)):
        place = names.index(name)
        with refuses(ValueError, name, "unpatch"):
            base(tokens, *[None] * (place - 1), value)
    expected = base(tokens)[0]
    assert torch.equal(base(tokens, None, torch.ones(1, 8))[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_static_cache(family: str) -> None:
    """Told as such where the mask is right."""
    patched, (tokens, mask) = ts.patch(FAMILIES[family]()), padded("left", 30)
    past = transformers.StaticCache(config=patched.config, max_cache_len=34)
    patched(tokens, attention_mask=mask, past_key_values=past)
    longer = torch.nn.functional.pad(mask, (0, 5), value=True)
    with refuses(ValueError, "the cache has room for 34 tokens, and 35 are to go there", "max_cache_len"):
        patched(tokens[:, :5], attention_mask=longer, past_key_values=past)


def test_a_cache_that_forgets_is_refused() -> None:
    patched = ts.patch(FAMILIES["bloom"]())
    past = transformers.DynamicCache()
    past.layers = [transformers.cache_utils.DynamicSlidingWindowLayer(4) for _ in range(2)]
    patched(tokens_of(1, 8), past_key_values=past)
    with refuses(ValueError, "a cache that forgets"):
        patched(tokens_of(1, 1), past_key_values=past)


@pytest.mark.slow
@pytest.mark.filterwarnings("default", "error:::trainshort")  # torch deprecates parts that its compiler uses
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_whole(family: str) -> None:
    """Training, and steps with a growing cache that are now compiled and now not."""
    patched = ts.patch(FAMILIES[family]())
    tokens, mask = padded("left", 60)
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    gradients = []
    for model in (patched, compiled):
        model(tokens, attention_mask=mask, labels=tokens, use_cache=True).loss.backward()
        gradients.append([each.grad for each in patched.parameters()])
        patched.zero_grad(set_to_none=True)
    for found, expected in zip(*gradients, strict=True):
        assert_same(found, expected)
    past = transformers.DynamicCache(config=patched.config)
    with torch.no_grad():
        found = [patched(tokens[:, :50], past_key_values=past, use_cache=True).logits]
        for place in range(50, 60):
            model = compiled if place % 2 else patched
            found.append(model(tokens[:, place : place + 1], past_key_values=past, use_cache=True).logits)
        assert_same(torch.cat(found, dim=1), patched(tokens).logits)


def test_falcon_with_eager_attention_is_patched_to_its_default() -> None:
    """transformers adds the bias twice there, as docs/public-models.md says: should that end, so must the remark."""
    default, tokens = FAMILIES["falcon"](), tokens_of(1, 30)
    config = copy.deepcopy(default.config)
    config._attn_implementation = "eager"
    twin = type(default)(config).eval()
    twin.load_state_dict(default.state_dict())
    with torch.no_grad():
        expected = default(tokens).logits
        assert float((twin(tokens).logits - expected).abs().max()) > 1e-3 * float(expected.abs().max())
        assert_same(ts.patch(twin)(tokens).logits, expected)
