"""No position method: all hooks leave everything as it is, and only the causal mask tells of order."""

from __future__ import annotations

import torch

import trainshort as ts
from trainshort.positions import Position, Shape, build_position

SHAPE = Shape(d_model=16, num_heads=2, head_dim=8)


def test_every_hook_leaves_things_as_they_are() -> None:
    for position in (build_position("none", SHAPE, {}), Position()):
        x, q, k = torch.randn(2, 5, 16), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 8)
        places = torch.arange(5)[None]
        assert position.embed(x, places) is x
        turned = position.rotate(q, k, places)
        assert turned[0] is q
        assert turned[1] is k
        assert position.bias() is None
        assert position.gates() is None
        assert position.at_length(10**6, growing=True) is position
        assert position.max_length is None
        assert position.state_dict() == {}


def test_without_a_causal_mask_order_is_invisible() -> None:
    """An encoder without positions gives the states of shuffled tokens, shuffled."""
    torch.manual_seed(0)
    encoder = ts.Encoder(
        ts.ModelConfig(position="none", causal=False, vocab_size=97, d_model=32, num_layers=2, num_heads=4)
    ).eval()
    tokens = torch.randint(97, (2, 60))
    order = torch.randperm(60)
    torch.testing.assert_close(encoder(tokens[:, order]), encoder(tokens)[:, order], rtol=1e-4, atol=1e-5)
