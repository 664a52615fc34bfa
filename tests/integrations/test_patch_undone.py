"""What patching leaves alone: undone exactly, saved as stock, other models as before; what cannot be patched."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts

pytest.importorskip("transformers")

import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests.integrations.stock import FAMILIES, assert_same, padded, patched_like, refuses, stock_logits, tokens_of
from tests.models.public.native import bloom, falcon

pytestmark = pytest.mark.transformers


def traits(model: nn.Module) -> list[tuple[Any, ...]]:
    """All that patching could leave behind: classes, attributes, configs and their contents, hooks, parameters."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        config = vars(module).get("config")
        contents = None if config is None else {key: repr(value) for key, value in vars(config).items()}
        hooks = len(module._forward_pre_hooks) + len(module._forward_pre_hooks_with_kwargs)
        own = sorted(vars(module))
        found.append((name, type(module), own, id(config), contents, hooks))
    return [*found, *((name, id(each)) for name, each in model.named_parameters())]


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_everything(family: str) -> None:
    model, tokens = FAMILIES[family](), tokens_of(2, 30)
    with torch.no_grad():
        before, logits = traits(model), model(tokens).logits
        assert ts.patch(model) is model
        once = traits(model)
        assert once != before
        assert traits(ts.patch(model)) == once, "patching twice changed something"
        patched_logits = model(tokens).logits
        assert ts.unpatch(model) is model
        assert traits(model) == before
        assert torch.equal(model(tokens).logits, logits)
        assert traits(ts.unpatch(model)) == before
        assert torch.equal(ts.patch(model)(tokens).logits, patched_logits)


def test_what_was_changed_in_the_config_while_patched_stays() -> None:
    model = ts.patch(FAMILIES["bloom"]())
    model.config.use_cache = False
    ts.unpatch(model)
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "eager"


def test_what_others_changed_in_a_shared_config_meanwhile_stays() -> None:
    model = FAMILIES["bloom"]()
    config, other = model.config, type(model)(model.config)
    for each in (model, other):
        ts.patch(each)
    config.pad_token_id = 3
    model.config.use_cache = False
    for each in (model, other):
        ts.unpatch(each)
        assert each.config is config
    assert (config.pad_token_id, config.use_cache) == (3, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_run_as_before(family: str) -> None:
    """Also one that was made from the same config object, whose mask would be another one."""
    model, tokens = FAMILIES[family](), tokens_of(2, 30)
    other = type(model)(model.config).eval()
    names = set(ALL_MASK_ATTENTION_FUNCTIONS.keys())
    with torch.no_grad():
        expected = other(tokens).logits
        ts.patch(model)
        model(tokens)
        assert torch.equal(other(tokens).logits, expected)
        assert other.config is not model.config
    assert set(ALL_MASK_ATTENTION_FUNCTIONS.keys()) - names <= {"trainshort_padding"}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_it_is_stock(family: str, tmp_path: Path) -> None:
    stock = FAMILIES[family]()
    stock.save_pretrained(tmp_path / "stock")
    patched = ts.patch(stock)
    keys = list(patched.state_dict())
    patched.save_pretrained(tmp_path / "patched")
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "stock" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes()
    loaded = type(patched).from_pretrained(tmp_path / "patched")
    assert list(loaded.state_dict()) == keys
    assert "Patched" not in repr(loaded)
    tokens = tokens_of(1, 20)
    with torch.no_grad():
        assert_same(patched(tokens).logits, stock_logits(loaded, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_copied_and_pickled_it_stays_patched(family: str) -> None:
    model, tokens = ts.patch(FAMILIES[family]()), tokens_of(1, 20)
    with torch.no_grad():
        expected = model(tokens).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(tokens).logits, expected)
            ts.unpatch(twin)
            assert "Patched" not in repr(twin)
            assert torch.equal(model(tokens).logits, expected)


LOADED = """
import sys, torch
model, tokens, mask, expected = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(tokens, attention_mask=mask).logits, expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pickled_it_is_patched_in_a_new_process_too(family: str, tmp_path: Path) -> None:
    """With padding, which only the registered mask function hands through."""
    model = ts.patch(FAMILIES[family]())
    tokens, mask = padded("left", 20)
    with torch.no_grad():
        torch.save((model, tokens, mask, model(tokens, attention_mask=mask).logits), tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", LOADED, tmp_path / "model.pt"], check=True)


class Adapted(nn.Module):
    """As PEFT's LoRA: a linear layer with a product of two small matrices beside it."""

    def __init__(self, base_layer: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a, self.b = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(out, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T


class Wrapper(nn.Module):
    """As PEFT's models: the model further down, and its config on the outside too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.config = model.config

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.base_model.model(*arguments, **keywords)


def test_inside_a_wrapper_with_adapters() -> None:
    stock, tokens = FAMILIES["falcon"](), tokens_of(2, 40)
    for block in stock.transformer.h:
        block.self_attention.query_key_value = Adapted(block.self_attention.query_key_value, 48, 144)
    wrapped = Wrapper(stock)
    names = list(wrapped.state_dict())
    for parameter in stock.parameters():
        parameter.requires_grad_(False)
    adapters = [each for name, each in wrapped.named_parameters() if name.endswith((".a", ".b"))]
    for each in adapters:
        each.requires_grad_()
    gradients = []
    for _ in range(2):
        out = wrapped(tokens, attention_mask=torch.ones(tokens.shape), labels=tokens)
        gradients.append((out.logits.detach(), *torch.autograd.grad(out.loss, adapters)))
        ts.patch(wrapped)
    for expected, found in zip(*gradients, strict=True):
        assert_same(found, expected, of=3e-5)
    assert list(wrapped.state_dict()) == names
    assert wrapped.config is stock.config
    ts.unpatch(wrapped)
    assert wrapped.config is stock.config
    assert stock.config._attn_implementation == "sdpa"


def test_the_base_model_first_and_its_head_later() -> None:
    model, tokens = FAMILIES["mpt"](), tokens_of(1, 20)
    expected = patched_like(model)(tokens).logits
    ts.patch(model.transformer)
    assert torch.equal(model(tokens).logits, expected)
    ts.patch(model)
    assert model.config is model.transformer.config
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_unpatched_before_its_head(family: str) -> None:
    """The head runs as it did at once; unpatched itself, or patched again, it is whole."""
    model, (tokens, mask) = FAMILIES[family](), padded("left", 20)
    options = {"attention_mask": mask.long(), "max_new_tokens": 5, "do_sample": False, "use_cache": True}
    before, expected = traits(model), model.generate(tokens, **options)
    ts.patch(model)
    ts.unpatch(model.transformer)
    assert torch.equal(model.generate(tokens, **options), expected)
    assert model.config._attn_implementation == model.transformer.config._attn_implementation
    ts.unpatch(model)
    assert traits(model) == before
    ts.patch(model)
    ts.unpatch(model.transformer)
    ts.patch(model)
    assert model.config is model.transformer.config
    past = transformers.StaticCache(config=model.config, max_cache_len=30)
    assert torch.equal(model.generate(tokens, past_key_values=past, **options), expected)
    ts.unpatch(model)
    assert traits(model) == before


@pytest.mark.parametrize("family", ["mpt", "falcon"])
def test_a_base_patched_without_its_head_says_so(family: str) -> None:
    """The head makes a mask for a static cache by its own config."""
    model = FAMILIES[family]()
    ts.patch(model.transformer)
    with refuses(ValueError, "attention_mask", "patch the whole model, not its base alone"):
        options = {"max_new_tokens": 2, "cache_implementation": "static", "use_cache": True}
        model.generate(tokens_of(1, 8), attention_mask=torch.ones(1, 8, dtype=torch.long), **options)


def test_two_models_of_one_config_in_one_wrapper() -> None:
    first = FAMILIES["falcon"]()
    both = nn.ModuleList([first, type(first)(first.config)])
    before = traits(both)
    ts.patch(both)
    assert both[0].transformer.config is both[0].config is not both[1].config
    assert both[1].transformer.config is both[1].config
    ts.unpatch(both[0])
    ts.unpatch(both)
    assert traits(both) == before


def test_models_that_cannot_be_patched() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1))
    for wrong in (gpt2, ts.LanguageModel(ts.ModelConfig(vocab_size=9, d_model=8, num_layers=1, num_heads=1))):
        with refuses(TypeError, type(wrong).__name__, "BloomModel", "MptModel", "FalconModel", "alibi=True"):
            ts.patch(wrong)
        assert ts.unpatch(wrong) is wrong
    with refuses(TypeError, "str", "BloomModel"):
        ts.patch("bloom-560m")
    with refuses(TypeError, "NoneType", "BloomModel"):
        ts.unpatch(None)
    with refuses(ValueError, "rotary", "alibi=False"):
        ts.patch(falcon(6, alibi=False))
    with refuses(ValueError, "slow_but_exact", "pretraining_tp"):
        ts.patch(bloom(6, slow_but_exact=True, pretraining_tp=2))
    ts.patch(bloom(6, slow_but_exact=True, pretraining_tp=1))
    causal = bloom(6)
    causal.config.is_causal = False
    with refuses(ValueError, "is_causal"):
        ts.patch(causal)


def test_nothing_is_changed_where_one_module_is_refused() -> None:
    model = bloom(6)
    model.transformer.h[1].self_attention.forward = lambda *arguments, **keywords: None
    before = traits(model)
    with refuses(ValueError, "forward", "accelerate"):
        ts.patch(model)
    assert traits(model) == before
    other = bloom(6)
    other.transformer.h[1].self_attention.__class__ = type(
        "Other", (type(other.transformer.h[0].self_attention),), {}
    )
    with refuses(TypeError, "Other", "BloomAttention"):
        ts.patch(other)
