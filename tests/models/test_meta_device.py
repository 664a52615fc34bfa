"""Models built on the meta device, without memory, and filled later: the same models, tied and with all tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import trainshort as ts
from tests.models.saved import Model, assert_same_model
from tests.models.small import EVERY_POSITION, encoder, language_model, lively, random_tokens, small_config

ALIBI_OPTIONS = [{"slopes": [0.7, 0.3, 0.11, 0.05], "scale": 0.3}, {"trainable": True}, {"scale": 1.7}]
VARIANTS = [*((name, {}) for name in EVERY_POSITION), *(("alibi", options) for options in ALIBI_OPTIONS)]


def built_on_meta(model: Model) -> Any:
    with torch.device("meta"):
        return type(model)(model.config)


def filled_by_copying(model: Model) -> Any:
    empty = built_on_meta(model).to_empty(device="cpu")
    for tensor in (*empty.parameters(), *(b for name, b in empty.named_buffers() if name in empty.state_dict())):
        tensor.data.fill_(float("nan"))  # what memory holds by chance must not matter
    empty.load_state_dict(model.state_dict())
    return empty


def filled_by_assigning(model: Model) -> Any:
    empty = built_on_meta(model)
    empty.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return empty


FILLS = [filled_by_copying, filled_by_assigning]


def on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


@pytest.mark.parametrize(("position", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("kind", [language_model, encoder])
def test_config_and_model_can_be_built_on_meta(
    kind: Callable[..., Model], position: str, options: dict[str, Any]
) -> None:
    causal = kind is language_model
    with torch.device("meta"):
        config = small_config(position, causal=causal, position_options=options)
        model = (ts.LanguageModel if causal else ts.Encoder)(config)
    assert config == small_config(position, causal=causal, position_options=options)
    assert all(on_meta(tensor) for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("position", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("kind", [language_model, encoder])
def test_a_filled_model_is_the_original(
    kind: Callable[..., Model],
    position: str,
    options: dict[str, Any],
    tied: bool,
    fill: Callable[[Model], Any],
) -> None:
    model = kind(position, position_options=options, tie_embeddings=tied)
    filled = fill(model)
    assert_same_model(filled, model)
    assert (filled.head.weight is filled.trunk.embedding.weight) is tied
    assert len(list(filled.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("fill", FILLS)
def test_a_filled_model_with_one_sided_heads(fill: Callable[[Model], Any]) -> None:
    model = encoder(position_options={"one_sided": True})
    assert_same_model(fill(model), model)


@pytest.mark.parametrize("fill", FILLS)
def test_a_filled_tied_model_trains_and_is_saved_as_one(fill: Callable[[Model], Any], tmp_path: Path) -> None:
    filled = fill(language_model(tie_embeddings=True))
    tokens = random_tokens(2, 30)
    optimizer = torch.optim.SGD(filled.parameters(), lr=0.1)
    filled.loss(tokens, tokens).backward()
    optimizer.step()
    assert torch.equal(filled.head.weight, filled.trunk.embedding.weight)
    ts.save(filled, tmp_path)
    assert_same_model(ts.load(tmp_path), filled)


def test_a_checkpoint_that_names_a_tied_tensor_once() -> None:
    """As saved files do."""
    model = language_model(tie_embeddings=True)
    state = model.state_dict()
    del state["head.weight"]
    filled = built_on_meta(model)
    assert filled.load_state_dict(state, strict=False, assign=True).missing_keys == ["head.weight"]
    assert_same_model(filled, model)
    assert filled.head.weight is filled.trunk.embedding.weight


def test_a_head_taken_off_the_embedding_stays_off() -> None:
    """Whoever quantizes the head gives it a tensor of its own: moving or loading the model must not undo that."""
    model = language_model(tie_embeddings=True)
    model.head.weight = nn.Parameter(model.head.weight.detach() + 1.0)
    expected = model.head.weight.detach().clone()
    assert torch.equal(model.double().float().head.weight, expected)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert torch.equal(model.head.weight, expected)
    assert model.head.weight is not model.trunk.embedding.weight


def test_fixed_slopes_stay_float32_on_the_way() -> None:
    model = language_model(dtype=torch.bfloat16, position_options={"scale": 0.3})
    filled = built_on_meta(model).bfloat16().to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    assert_same_model(filled, model)
    assert [buffer.dtype for buffer in filled.buffers()] == [torch.float32]


def test_to_meta_and_back() -> None:
    model = language_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(random_tokens(2, 140))
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(model(random_tokens(2, 140)), expected)


def test_inside_a_larger_module() -> None:
    original = nn.ModuleDict({"one": language_model(tie_embeddings=True), "two": encoder("t5")})
    with torch.device("meta"):
        whole = nn.ModuleDict({name: type(part)(part.config) for name, part in original.items()})
    whole.to_empty(device="cpu").load_state_dict(original.state_dict())
    for name, part in original.items():
        assert_same_model(whole[name], part)
    assert whole["one"].head.weight is whole["one"].trunk.embedding.weight


@pytest.mark.parametrize("assign", [True, False])
def test_alibi_transformer(assign: bool) -> None:
    config = ts.ALiBiConfig(num_layers=2, d_model=48, num_heads=3)
    model = lively(ts.ALiBiTransformer(config)).eval()
    with torch.device("meta"):
        filled = ts.ALiBiTransformer(config)
    assert all(on_meta(parameter) for parameter in filled.parameters())
    if not assign:
        filled.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict(), assign=assign)
    x = torch.randn(2, 140, 48)
    assert torch.equal(filled.eval()(x), model(x))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_fake_tensors_have_no_values_either(position: str) -> None:
    with FakeTensorMode():
        ts.LanguageModel(small_config(position))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_forward_pass_without_memory_has_its_shape(position: str) -> None:
    """For those who count parameters and activations before they buy a machine."""
    with torch.device("meta"):
        model = language_model(position)
        tokens = torch.zeros((2, 30), dtype=torch.int64)
    assert model(tokens).shape == (2, 30, model.config.vocab_size)
