"""A two-layer model learns a paragraph by heart, with every position method, in seconds."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.models.small import EVERY_POSITION

PARAGRAPH = (
    "Attention with linear biases adds nothing to the embeddings. It takes a little from each score instead, "
    "the more the further a key lies behind its query."
)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_paragraph_by_heart(position: str) -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([list(PARAGRAPH.encode())])
    config = ts.ModelConfig(
        vocab_size=128, d_model=64, num_layers=2, num_heads=4, position=position, max_length=len(PARAGRAPH)
    )
    model = ts.LanguageModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.03, total_iters=30)
    means: list[float] = []
    for _ in range(400):
        losses = model.loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
        means.append(losses.mean().item())
        if means[-1] < 0.05 and losses.max().item() < 0.5:  # every byte has a probability above 0.6
            break
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        warm_up.step()
    assert means[0] > 4.5, "an untrained model knows nothing: ln 128 = 4.85"
    assert means[-1] < 0.05
    assert losses.max().item() < 0.5
    continued = model.generate(tokens[:, :20], max_new_tokens=len(PARAGRAPH) - 20, temperature=0.0)
    assert bytes(continued[0].tolist()).decode() == PARAGRAPH
