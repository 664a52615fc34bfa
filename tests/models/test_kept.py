"""The share of keys that certified windows keep, counted by hand."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.models.small import language_model, random_tokens
from trainshort.models.kept import attended, share_of_keys


@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "fox", "kerple"])
def test_it_is_the_share_of_blocks_that_windows_visit(position: str) -> None:
    options = {"kind": "power"} if position == "kerple" else {}
    model, tokens = language_model(position, num_layers=2, position_options=options), random_tokens(1, 1500)
    if position == "fox":
        for block in model.trunk.blocks:
            block.attention.gates.logits.bias.fill_(2.0)
    with attended(model) as seen:
        model(tokens)
    assert len(seen) == 2
    visited = visible = 0
    for q, k, _, bias in seen:
        for window in ts.certified_windows(q, k, bias=bias, scale=model.config.score_scale)[0].flatten(0, 1).tolist():
            visited += window[1] - window[0]
        visible += model.config.num_heads * sum(range(1, 13))
    found = share_of_keys(model, tokens)
    assert found == visited / visible
    assert found < 0.95, "nothing was skipped"


def test_it_falls_as_slopes_rise() -> None:
    tokens = random_tokens(1, 1500)
    shares = [share_of_keys(language_model(position_options={"scale": scale}), tokens) for scale in (0.01, 1.0, 8.0)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[2] < shares[1]


@pytest.mark.parametrize("position", ["rotary", "t5", "none", "sinusoidal", "kerple"])
def test_other_methods_skip_nothing_and_say_nothing(position: str) -> None:
    model = language_model(position)
    assert share_of_keys(model, random_tokens(1, 50)) is None
    assert all("attend" not in block.attention.__dict__ for block in model.trunk.blocks)
