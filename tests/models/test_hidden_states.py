"""Hidden states by layer: what goes into the first block, what each block makes of it, and what the head reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_language_model(position: str) -> None:
    model, tokens = language_model(position, num_layers=3), random_tokens(2, 20)
    inputs: list[torch.Tensor] = []
    for block in model.trunk.blocks:
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    states = model.hidden_states(tokens)
    assert len(states) == 4
    assert all(torch.equal(state, given) for state, given in zip(states, inputs, strict=False))
    assert torch.equal(model.head(states[-1]), model(tokens))


@pytest.mark.parametrize("norm_place", ["pre", "post"])
def test_an_encoder_with_padding_and_token_types(norm_place: str) -> None:
    model, tokens = encoder(norm_place=norm_place, token_types=2), random_tokens(2, 20)
    mask, kinds = torch.arange(20) < torch.tensor([[20], [13]]), random_tokens(2, 20, vocabulary=2)
    states = model.hidden_states(tokens, mask, token_types=kinds)
    assert len(states) == 3
    assert torch.equal(states[-1], model(tokens, mask, token_types=kinds))
    assert not torch.equal(states[0], model.hidden_states(tokens, mask)[0])
    with pytest.raises(ValueError, match=r"token_types must lie in \[0, 2\)"):
        model.hidden_states(tokens, mask, token_types=kinds + 1)


def test_packed_documents() -> None:
    model, tokens = language_model(), random_tokens(1, 20)
    states = model.hidden_states(tokens, cu_seqlens=torch.tensor([0, 8, 20]))
    alone = model.hidden_states(tokens[:, 8:])
    for packed, single in zip(states, alone, strict=True):
        torch.testing.assert_close(packed[:, 8:], single)


@pytest.mark.parametrize("change", ["plain", "checkpointed"])
def test_gradients_flow_through_all(change: str) -> None:
    model = language_model().train()
    model.checkpoint_activations(change == "checkpointed")
    states = model.hidden_states(random_tokens(2, 20))
    sum(state.square().mean() for state in states).backward()  # type: ignore[union-attr]
    parts = {name: parameter.grad for name, parameter in model.trunk.named_parameters()}
    assert all(gradient is not None and bool(gradient.any()) for gradient in parts.values())


@pytest.mark.parametrize("model", [language_model(), encoder()], ids=lambda model: type(model).__name__)
def test_what_is_no_tokens(model: Any) -> None:
    with pytest.raises(TypeError, match="tokens must be an int tensor"):
        model.hidden_states("a text")


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    model, tokens = language_model(), random_tokens(2, 20)
    compiled = torch.compile(model.hidden_states, fullgraph=True, backend="eager")
    for one, two in zip(compiled(tokens), model.hidden_states(tokens), strict=True):
        torch.testing.assert_close(one, two)
