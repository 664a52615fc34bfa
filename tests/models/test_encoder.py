"""Encoder: sees both sides, never padding; a masked-token loss and one vector a text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from tests.models import dense
from tests.models.largest import Largest
from tests.models.small import EVERY_POSITION, VOCABULARY, encoder, random_tokens, small_config


def padded(side: str, counts: list[int], length: int) -> Tensor:
    index, count = torch.arange(length)[None], torch.tensor(counts)[:, None]
    return index >= length - count if side == "left" else index < count


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_late_token_changes_early_states_and_the_other_way_round(position: str) -> None:
    model, tokens = encoder(position), random_tokens(1, 20)
    with torch.no_grad():
        states = model(tokens)
        assert states.shape == (1, 20, 32)
        for place in (0, 19):
            changed = tokens.clone()
            changed[0, place] = (changed[0, place] + 1) % VOCABULARY
            assert bool(((model(changed) - states).abs().amax(-1) > 1e-3).all())


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_under_padding_does_not_matter(side: str, position: str) -> None:
    model, tokens = encoder(position), random_tokens(3, 150)
    mask = padded(side, [150, 97, 5], 150)
    with torch.no_grad():
        states = model(tokens, mask)
        for filler in (0, 7, VOCABULARY - 1):
            other = model(tokens.masked_fill(~mask, filler), mask)
            torch.testing.assert_close(other[mask], states[mask], rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(states).all())


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_those_rows_alone(side: str, position: str) -> None:
    model, tokens, counts = encoder(position), random_tokens(3, 150), [150, 97, 5]
    mask = padded(side, counts, 150)
    with torch.no_grad():
        states = model(tokens, mask)
        for row, count in enumerate(counts):
            alone = model(tokens[row, mask[row]][None])
            assert alone.shape[1] == count
            torch.testing.assert_close(states[row, mask[row]], alone[0], rtol=1e-4, atol=1e-4)


def test_a_row_of_nothing_but_padding_is_no_danger_to_others() -> None:
    model, tokens = encoder(), random_tokens(2, 30)
    mask = padded("right", [30, 0], 30)
    states = model(tokens, mask)
    assert bool(torch.isfinite(states).all())
    torch.testing.assert_close(states[0], model(tokens[:1])[0], rtol=1e-4, atol=1e-4)
    model.loss(tokens, tokens.masked_fill(~mask, -100), mask).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_no_mask_and_a_mask_of_ones_are_the_same() -> None:
    model, tokens = encoder(), random_tokens(2, 140)
    torch.testing.assert_close(
        model(tokens, torch.ones(2, 140, dtype=torch.bool)), model(tokens), rtol=1e-4, atol=1e-4
    )


def test_token_types() -> None:
    model, tokens, kinds = encoder(token_types=3), random_tokens(2, 40), random_tokens(2, 40, vocabulary=3, seed=4)
    with torch.no_grad():
        found = model(tokens, token_types=kinds)
        expected = dense.hidden_states(model.config, dense.weights_of(model), tokens, token_types=kinds)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(tokens), model(tokens, token_types=0 * kinds))
        assert (model(tokens) - found).abs().max().item() > 0.1


def test_token_types_of_a_model_that_has_none() -> None:
    with pytest.raises(ValueError, match="token_types were given, but the model has none"):
        encoder()(random_tokens(1, 5), token_types=torch.zeros(1, 5, dtype=torch.int64))


def test_token_types_in_loss_and_pooling() -> None:
    model, tokens, kinds = encoder(token_types=3), random_tokens(2, 40), random_tokens(2, 40, vocabulary=3, seed=4)
    targets, mask = masked_targets(random_tokens(2, 40, seed=1)), padded("right", [40, 25], 40)
    targets = targets.masked_fill(~mask, -100)
    states = model(tokens, mask, token_types=kinds)
    expected = F.cross_entropy(model.logits(states).flatten(0, 1), targets.flatten())
    loss = model.loss(tokens, targets, mask, token_types=kinds)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert abs(loss.item() - model.loss(tokens, targets, mask).item()) > 1e-3
    loss.backward()
    assert model.trunk.token_types is not None
    assert bool((model.trunk.token_types.weight.grad != 0).any(-1).all())
    pooled = model.pool(tokens, mask, token_types=kinds)
    torch.testing.assert_close(pooled[1], states[1, :25].mean(0), rtol=1e-4, atol=1e-4)
    assert (pooled - model.pool(tokens, mask)).abs().max().item() > 0.1


@pytest.mark.parametrize("call", ["forward", "loss", "pool"])
@pytest.mark.parametrize(
    ("kinds", "error", "match"),
    [
        (torch.full((2, 9), 3), ValueError, r"token_types must lie in \[0, 3\).* token_types=3; got 3$"),
        (torch.full((2, 9), -1), ValueError, r"token_types must lie in \[0, 3\).* token_types=3; got -1$"),
        (torch.tensor([[0] * 9, [0] * 8 + [1000]]), ValueError, r"\[0, 3\).*; got 1000$"),
        (torch.zeros(2, 8, dtype=torch.int64), ValueError, r"token_types must be \[2, 9\] like tokens, got \[2, 8\]"),
        (torch.zeros(9, dtype=torch.int64), ValueError, r"token_types must be \[2, 9\] like tokens, got \[9\]"),
        (torch.zeros(2, 9), TypeError, r"token_types must be int32 or int64, got torch.float32"),
    ],
    ids=["too large", "negative", "one too large", "short", "flat", "float"],
)
def test_token_types_that_cannot_be(call: str, kinds: Tensor, error: type[Exception], match: str) -> None:
    model, tokens = encoder(token_types=3), random_tokens(2, 9)
    arguments = (tokens, tokens) if call == "loss" else (tokens,)
    with pytest.raises(error, match=match):
        getattr(model, call)(*arguments, token_types=kinds)


@pytest.mark.parametrize("call", ["loss", "pool"])
def test_token_types_for_loss_and_pooling_of_a_model_that_has_none(call: str) -> None:
    model, tokens = encoder(), random_tokens(2, 9)
    arguments = (tokens, tokens) if call == "loss" else (tokens,)
    with pytest.raises(ValueError, match="token_types were given, but the model has none"):
        getattr(model, call)(*arguments, token_types=torch.zeros_like(tokens))


# Masked tokens


def masked_targets(tokens: Tensor) -> Tensor:
    return tokens.masked_fill(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) > 0.15, -100)


@pytest.mark.parametrize("tied", [True, False])
def test_masked_token_loss_is_cross_entropy_of_the_chosen(tied: bool) -> None:
    model, tokens = encoder(tie_embeddings=tied, head_bias=True), random_tokens(2, 60)
    targets, mask = masked_targets(random_tokens(2, 60, seed=1)), padded("right", [60, 44], 60)
    targets = targets.masked_fill(~mask, -100)
    scores = model.logits(model(tokens, mask))
    assert scores.shape == (2, 60, VOCABULARY)
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    loss = model.loss(tokens, targets, mask)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for one, two in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_only_masked_tokens_get_logits() -> None:
    model, tokens = encoder(vocab_size=5000, d_model=8, num_heads=1), random_tokens(1, 200)
    targets = torch.full_like(tokens, -100)
    targets[0, 50:60] = 3
    with torch.no_grad(), Largest() as largest:
        model.loss(tokens, targets)
    assert largest.elements <= 10 * 5000 + 200 * 200


def test_the_head_is_the_formula() -> None:
    model, tokens = encoder(dtype=torch.float64, activation="gelu_tanh"), random_tokens(2, 30)
    weights, config = dense.weights_of(model), model.config
    inner = dense.activated(config, dense.linear(weights, "head_dense", dense.hidden_states(config, weights, tokens)))
    expected = dense.linear(weights, "head", dense.normed(config, weights, "head_norm", inner))
    torch.testing.assert_close(model.logits(model(tokens)), expected, rtol=1e-9, atol=1e-9)


def test_targets_have_the_shape_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"\[2, 20\].* \[2, 19\]"):
        encoder().loss(random_tokens(2, 20), random_tokens(2, 19))


def test_loss_of_int32_tokens_and_targets() -> None:
    model, tokens = encoder(), random_tokens(2, 30)
    torch.testing.assert_close(model.loss(tokens.int(), tokens.int()), model.loss(tokens, tokens))


# One vector a text


@pytest.mark.parametrize("side", ["left", "right"])
def test_mean_pooling_counts_real_tokens(side: str) -> None:
    model, tokens, counts = encoder(), random_tokens(3, 50), [50, 20, 1]
    mask = padded(side, counts, 50)
    vectors = model.pool(tokens, mask)
    assert vectors.shape == (3, 32)
    for row in range(3):
        expected = model(tokens[row, mask[row]][None])[0].mean(0)
        torch.testing.assert_close(vectors[row], expected, rtol=1e-4, atol=1e-4)


def test_mean_pooling_without_padding() -> None:
    model, tokens = encoder(), random_tokens(2, 50)
    torch.testing.assert_close(model.pool(tokens), model(tokens).sum(1) / 50)


def test_pooling_half_precision_counts_right() -> None:
    """More real tokens than bfloat16 can count."""
    model, tokens = encoder(dtype=torch.bfloat16), random_tokens(1, 700)
    mask = padded("right", [601], 700)
    pooled = model.pool(tokens, mask)
    assert pooled.dtype == torch.bfloat16
    expected = model(tokens, mask)[:, :601].float().mean(1)
    torch.testing.assert_close(pooled.float(), expected, rtol=2.0**-7, atol=2.0**-7 * expected.abs().max().item())


# Errors


def test_a_causal_config_is_refused() -> None:
    with pytest.raises(ValueError, match="causal=False"):
        ts.Encoder(small_config())


def test_a_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"got 61$"):
        encoder()(torch.tensor([[3, 61]]))


@pytest.mark.parametrize(("shape", "dtype"), [((2, 9), torch.bool), ((1, 20), torch.bool), ((2, 20), torch.int64)])
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_mask_that_does_not_fit(position: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises((ValueError, TypeError), match="key_padding_mask must"):
        encoder(position)(random_tokens(2, 20), torch.ones(shape, dtype=dtype))


def test_a_mask_with_a_hole() -> None:
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 7] = False
    with pytest.raises(ValueError, match="row 1 has a hole"):
        encoder()(random_tokens(2, 20), mask)


def test_learned_positions_say_where_they_end() -> None:
    with pytest.raises(ValueError, match="learned positions end at 20 tokens, got 21"):
        encoder("learned", max_length=20)(random_tokens(1, 21))
