"""Methods of users: those written for embed, rotate and bias alone go on working; gates are a hook like others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models.small import FOX_PRO, language_model, lively, random_tokens, small_config
from trainshort.positions import POSITIONS, Position, Shape


class ThreeHooks(Position):
    """As methods looked before there were gates: something at each of three places, and a parameter of its own."""

    def __init__(self, shape: Shape, *, size: float = 1.0) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(torch.randn(32, shape.num_heads))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.size * torch.sin(positions.to(x.dtype))[..., None]

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q * 1.5, k

    def bias(self) -> ts.BucketBias:
        return ts.BucketBias(self.table)


class Constant(nn.Module):
    """Gates that forget the same at every token."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, x: Tensor) -> Tensor:
        return -self.slopes.to(x.dtype)[None, :, None].expand(x.shape[0], -1, x.shape[1])


class AlibiByGates(Position):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_heads

    def gates(self) -> nn.Module:
        return Constant(ts.alibi_slopes(self.heads, "cpu"))


class Both(AlibiByGates):
    def bias(self) -> ts.LinearBias:
        return ts.LinearBias(torch.ones(self.heads))


@pytest.fixture(autouse=True)
def _methods() -> Iterator[None]:
    mine: dict[str, type[Position]] = {"three_hooks": ThreeHooks, "alibi_by_gates": AlibiByGates, "both": Both}
    POSITIONS.update(mine)
    yield
    for name in mine:
        POSITIONS.pop(name)


def test_three_hooks_are_enough(tmp_path: Path) -> None:
    """In training, with a cache, packed, generating, saved and loaded."""
    config = small_config("three_hooks", position_options={"size": 0.5}, **FOX_PRO)
    model, tokens = lively(ts.LanguageModel(config)), random_tokens(2, 60)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert isinstance(model.position, ThreeHooks)
    assert model.position.table.grad is not None
    model.eval()
    cache = model.make_cache(2)
    with torch.no_grad():
        found = torch.cat([model(part, cache=cache) for part in tokens.split([40, 1, 19], dim=1)], dim=1)
        torch.testing.assert_close(found, model(tokens), rtol=2e-5, atol=2e-4)
        packed = model(tokens[:1], cu_seqlens=torch.tensor([0, 25, 60]))
        torch.testing.assert_close(packed[:, :25], model(tokens[:1, :25]), rtol=1e-4, atol=1e-4)
    assert model.generate(tokens, max_new_tokens=5).shape == (2, 65)
    ts.save(model, tmp_path)
    assert torch.equal(ts.load(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize(
    ("method", "options"), [("rotary", {}), ("alibi", {"rotary": True}), ("fox", {"rotary": True})]
)
def test_a_rotate_of_its_own_is_called(method: str, options: dict[str, object]) -> None:
    """Steps on a GPU turn keys by `rotation`, which says no more what this rotate does."""
    kind = POSITIONS[method]
    shape = Shape(d_model=32, num_heads=2, head_dim=16)

    class Reversed(kind):  # type: ignore[misc, valid-type]
        def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            turned: tuple[Tensor, Tensor] = super().rotate(q, k, -positions)
            return turned

    class Named(kind):  # type: ignore[misc, valid-type]
        label = "mine"

    assert kind(shape, **options).rotation(torch.device("cpu")) is not None
    assert Named(shape, **options).rotation(torch.device("cpu")) is not None
    assert Reversed(shape, **options).rotation(torch.device("cpu")) is None


def test_constant_gates_are_alibi() -> None:
    tokens = random_tokens(2, 200)
    by_gates, by_slopes = language_model("alibi_by_gates"), language_model("alibi")
    with torch.no_grad():
        torch.testing.assert_close(by_gates(tokens), by_slopes(tokens), rtol=1e-4, atol=1e-4)
    assert torch.equal(
        by_gates.generate(tokens, max_new_tokens=20, temperature=0.0),
        by_slopes.generate(tokens, max_new_tokens=20, temperature=0.0),
    )


def test_gates_and_a_bias_are_refused() -> None:
    with pytest.raises(ValueError, match="position 'both' has gates and a bias"):
        language_model("both")(random_tokens(1, 5))
