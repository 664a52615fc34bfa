"""Norms of keys on the GPU: what the device itself refuses, and how rarely it is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import trainshort as ts
from tests.models.small import language_model, random_tokens

REFUSED = """
import torch
import trainshort as ts
x = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
norms = torch.full((1, 2, 4), {norm}, device="cuda")
ts.alibi_attention(x[:, :, -{queries}:], x, x, key_norms=norms)
torch.cuda.synchronize()
print("computed")
"""


@pytest.mark.parametrize("queries", [1, 512])
@pytest.mark.parametrize(("norm", "refused"), [("-1.0", True), ("float('nan')", False), ("0.0", False)])
def test_negative_norms_fail_on_the_device(norm: str, refused: bool, queries: int) -> None:
    """In a process of its own: after a failed assertion a CUDA context is of no use."""
    code = REFUSED.format(norm=norm, queries=queries)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("computed" in result.stdout) is not refused, result.stderr


def test_norms_of_a_cache_are_not_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are our own, and looking takes the host as long as a step."""
    model = language_model(dtype=torch.bfloat16).cuda()
    cache = model.make_cache(1)  # grows below: its new norms are our own, too
    looked_at = []
    monkeypatch.setattr(torch, "_assert_async", lambda good, message: looked_at.append(message))
    tokens = random_tokens(1, 300).cuda()
    with torch.no_grad():
        for part in tokens.split([250, *[1] * 20, 30], dim=1):
            model(part, cache=cache)
    assert not [message for message in looked_at if "key_norms" in message]
    q, k = torch.randn(1, 2, 1, 64, device="cuda"), torch.randn(1, 2, 300, 64, device="cuda")
    for norms in (k.norm(dim=-1).amax(-1), k.norm(dim=-1)):
        looked_at.clear()
        for _ in range(3):
            ts.alibi_attention(q, k, k, key_norms=norms)
        assert len([message for message in looked_at if "key_norms" in message]) == 1, "once for the same norms"
        norms.mul_(2.0)
        ts.alibi_attention(q, k, k, key_norms=norms)
        assert len([message for message in looked_at if "key_norms" in message]) == 2, "again when they have changed"
