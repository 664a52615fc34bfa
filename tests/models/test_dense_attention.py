"""Dense attention of whole models: the same function as the backends compute, refused where it is not made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainshort as ts

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("alibi", {}),
    ("alibi", {"biased_heads": 3, "rotary": True}),
    ("alibi", {"scaling": "linear", "trained_length": 20}),
    ("fox", {}),
    ("rotary", {}),
    ("t5", {}),
    ("kerple", {}),
    ("sinusoidal", {}),
    ("learned", {}),
    ("none", {}),
]


def model_of(position: str, options: dict[str, Any], **fields: Any) -> ts.LanguageModel:
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_length": 64} | fields
    shape["max_length"] = shape["max_length"] if position == "learned" else None
    model = ts.LanguageModel(ts.ModelConfig(position=position, position_options=options, **shape)).double()
    for parameter in model.parameters():  # T5's table begins at zero
        if parameter.abs().max() == 0:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("position", "options"), METHODS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_same_losses_and_gradients(position: str, options: dict[str, Any], kv_heads: int) -> None:
    model = model_of(position, options, num_kv_heads=kv_heads)
    tokens = torch.randint(50, (2, 41))

    def gradients() -> list[torch.Tensor]:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = gradients()
    model.attend_densely()
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    model.attend_densely(False)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_compiled_blocks_compute_it_too() -> None:
    model = model_of("alibi", {}).float()
    tokens = torch.randint(50, (2, 17))
    expected = model.loss(tokens[:, :-1], tokens[:, 1:])
    model.attend_densely()
    model.compile_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(model.loss(tokens[:, :-1], tokens[:, 1:]), expected)


def test_an_encoder_sees_both_sides() -> None:
    torch.manual_seed(2)
    model = ts.Encoder(ts.ModelConfig(vocab_size=50, d_model=32, num_layers=2, num_heads=4, causal=False)).double()
    tokens = torch.randint(50, (2, 30))
    expected = model(tokens)
    model.attend_densely()
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("what", ["padding", "packing", "cache"])
def test_what_it_is_not_made_for_is_refused(what: str) -> None:
    model = model_of("alibi", {})
    model.attend_densely()
    tokens = torch.randint(50, (1, 10))
    options: dict[str, Any] = {
        "padding": {"key_padding_mask": torch.ones(1, 10, dtype=torch.bool)},
        "packing": {"cu_seqlens": torch.tensor([0, 5, 10], dtype=torch.int32)},
        "cache": {"cache": model.make_cache(1)},
    }[what]
    with pytest.raises(ValueError, match="dense attention"):
        model.trunk(tokens, **options)
