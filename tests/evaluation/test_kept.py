"""What is recorded of certified windows is what attention visits."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.evaluation.models import model, text
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.kept import kept_keys

LENGTH = 1100


def sample() -> torch.Tensor:
    return torch.from_numpy(text(LENGTH).astype("int64"))[None]


@torch.no_grad()
def test_kept_is_the_share_of_blocks_that_windows_visit() -> None:
    network = model(d_model=32, size=2.0)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    rotate = network.position.rotate
    network.position.rotate = lambda q, k, positions: seen.append((q, k)) or rotate(q, k, positions)  # type: ignore[func-returns-value,method-assign]
    network(sample())
    del network.position.rotate
    found = kept_keys(network, sample(), chunk=2048)
    assert found is not None
    blocks = -(-LENGTH // 128)
    for layer, (q, k) in enumerate(seen):
        windows = ts.certified_windows(q, k)[0]
        visited = (windows[..., 1] - windows[..., 0]).sum(-1) / (blocks * (blocks + 1) / 2)
        assert found["kept"][layer] == pytest.approx(visited.tolist(), abs=1e-4)
    assert min(min(layer) for layer in found["kept"]) < 0.7  # otherwise nothing is tested


def test_chunks_visit_about_the_same() -> None:
    network = model(d_model=32, size=2.0)
    whole, parts = kept_keys(network, sample(), chunk=2048), kept_keys(network, sample(), chunk=256)
    assert whole is not None
    assert parts is not None
    for one, other in zip(whole["kept"], parts["kept"], strict=True):
        assert one == pytest.approx(other, abs=0.25)


def test_reach_grows_as_slopes_fall_and_ends_at_the_text() -> None:
    found = kept_keys(model(d_model=32, size=2.0), sample(), chunk=512)
    assert found is not None
    for reach, farthest in zip(found["reach"], found["farthest"], strict=True):
        assert reach[0] < reach[-1]
        assert all(near <= far <= LENGTH for near, far in zip(reach, farthest, strict=True))


@pytest.mark.parametrize("position", ["sinusoidal", "t5", "rotary", "none", "kerple"])
def test_other_methods_skip_nothing_and_say_nothing(position: str) -> None:
    assert kept_keys(model(position), sample(), chunk=512) is None
    (record,) = evaluate(model(position), text(200), EvaluateConfig(lengths=(100,)))
    assert "kept" not in record


def test_the_model_is_left_as_it_was() -> None:
    network = model()
    kept_keys(network, sample(), chunk=512)
    assert all("attend" not in block.attention.__dict__ for block in network.trunk.blocks)


@pytest.mark.parametrize("chunk", [2048, 256])
def test_gates_are_those_of_each_layer(chunk: int) -> None:
    """Of three layers, the gates of the second are nearly shut, and those of the others open."""
    network = model("fox", d_model=32, num_layers=3, size=2.0)
    with torch.no_grad():
        for layer, bias in enumerate((9.0, -4.0, 9.0)):
            network.trunk.blocks[layer].attention.gates.logits.bias.fill_(bias)
    found = kept_keys(network, sample(), chunk=chunk)
    assert found is not None
    assert found["kept"][0] == found["kept"][2] == [1.0] * 4
    assert max(found["kept"][1]) < 0.5
