"""torch.export: whole models as programs for texts of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import trainshort as ts
from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens

LENGTH = Dim("length", min=2, max=1024)


def assert_same_at(program: Any, model: nn.Module, *inputs: Tensor) -> None:
    torch.testing.assert_close(program(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_language_models(position: str) -> None:
    model = language_model(position).requires_grad_(False)
    program = export(model, (random_tokens(2, 100),), dynamic_shapes=({1: LENGTH},)).module()
    for length in (2, 100, 129, 500):
        assert_same_at(program, model, random_tokens(2, length))


def test_batch_and_length_of_grouped_queries_with_trained_slopes() -> None:
    model = language_model(num_kv_heads=2, position_options={"trainable": True}).requires_grad_(False)
    shapes = ({0: Dim("batch"), 1: LENGTH},)
    program = export(model, (random_tokens(2, 200),), dynamic_shapes=shapes).module()
    for batch, length in ((2, 200), (3, 5), (5, 400)):
        assert_same_at(program, model, random_tokens(batch, length))


@pytest.mark.parametrize("position", ["alibi", "rotary"])
def test_encoders_of_padded_rows(position: str) -> None:
    model = encoder(position).requires_grad_(False)

    def inputs(length: int) -> tuple[Tensor, Tensor]:
        return random_tokens(2, length), torch.arange(length)[None] < torch.tensor([length, length // 2])[:, None]

    program = export(model, inputs(100), dynamic_shapes=({1: LENGTH}, {1: LENGTH})).module()
    for length in (2, 129, 500):
        assert_same_at(program, model, *inputs(length))


def test_alibi_transformer() -> None:
    model = ts.ALiBiTransformer(ts.ALiBiConfig(num_layers=2, d_model=48, num_heads=3)).eval().requires_grad_(False)
    program = export(model, (torch.randn(2, 140, 48),), dynamic_shapes=({1: LENGTH},)).module()
    for length in (2, 100, 300):
        assert_same_at(program, model, torch.randn(2, length, 48))


def test_a_trained_model_can_be_exported_with_its_gradients() -> None:
    model = language_model()
    program = export(model, (random_tokens(2, 100),), dynamic_shapes=({1: LENGTH},)).module()
    tokens = random_tokens(2, 300)
    program(tokens).square().mean().backward()
    model(tokens).square().mean().backward()
    found = {name: parameter.grad for name, parameter in program.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)
