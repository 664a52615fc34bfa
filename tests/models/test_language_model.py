"""LanguageModel: logits of the right shape that never look ahead, a loss in little memory, and clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from tests.models.largest import Largest, peak_bytes
from tests.models.small import EVERY_POSITION, VOCABULARY, encoder, language_model, random_tokens
from trainshort.models import loss as module

# Logits


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 7), (3, 129)])
def test_shapes(batch: int, length: int, position: str) -> None:
    model = language_model(position)
    tokens = random_tokens(batch, length)
    assert model(tokens).shape == (batch, length, VOCABULARY)
    assert model(tokens, last_only=True).shape == (batch, 1, VOCABULARY)


def test_int32_tokens_are_tokens_too() -> None:
    model, tokens = language_model(), random_tokens(2, 20)
    assert torch.equal(model(tokens.int()), model(tokens))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_last_only_is_the_last_of_all(position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 140)
    torch.testing.assert_close(model(tokens, last_only=True)[:, 0], model(tokens)[:, -1], rtol=1e-4, atol=1e-4)


def test_last_only_makes_no_other_logits() -> None:
    model = language_model(vocab_size=5000, d_model=8, num_heads=1)
    tokens = random_tokens(1, 200)
    with torch.no_grad(), Largest() as largest:
        model(tokens, last_only=True)
    assert largest.elements < 200 * 5000


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("place", [1, 100, 128, 199])
def test_later_tokens_do_not_change_earlier_logits(place: int, position: str) -> None:
    model, tokens = language_model(position), random_tokens(1, 200)
    changed = tokens.clone()
    changed[:, place:] = (changed[:, place:] + 1 + random_tokens(1, 200 - place, seed=5) % 59) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=1e-4, atol=1e-4)
    assert (after - before)[:, place:].abs().amax(-1).min().item() > 0.1


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_rows_of_a_batch_do_not_meet(position: str) -> None:
    model, tokens = language_model(position), random_tokens(3, 60)
    together = model(tokens)
    for row in range(3):
        torch.testing.assert_close(model(tokens[row : row + 1])[0], together[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [p for p in EVERY_POSITION if p != "none"])
def test_order_matters(position: str) -> None:
    model, tokens = language_model(position), random_tokens(1, 40)
    swapped = tokens[:, [1, 0, *range(2, 40)]]
    assert (model(tokens) - model(swapped))[:, -1].abs().max().item() > 1e-3


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_close_to_float32(dtype: torch.dtype, position: str) -> None:
    model = language_model(position, dtype=dtype, num_heads=6, d_model=48)
    exact = language_model(position, num_heads=6, d_model=48)
    exact.load_state_dict(model.state_dict())  # the same rounded weights
    tokens = random_tokens(2, 300)
    with torch.no_grad():
        half, full = model(tokens), exact(tokens)
    assert half.dtype == dtype
    error = (half.float() - full).square().mean().sqrt() / full.square().mean().sqrt()
    assert float(error) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_autocast_is_close_to_float32(position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 200)
    full = model.loss(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        half = model.loss(tokens, tokens)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.02, atol=0.0)
    half.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Loss


def direct_loss(model: ts.LanguageModel, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), **options)


def gradients(model: ts.LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("at_once", [2**24, 61 * 7, 61, 1], ids=["whole", "parts", "one_by_one", "less_than_a_token"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_cross_entropy(monkeypatch: pytest.MonkeyPatch, reduction: str, at_once: int) -> None:
    model, tokens, targets = language_model(head_bias=True), random_tokens(2, 25), random_tokens(2, 25, seed=1)
    targets[0, 3:9] = -100
    expected = direct_loss(model, tokens, targets, reduction=reduction)
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", at_once)
    found = model.loss(tokens, targets, reduction=reduction)
    assert found.shape == ((2, 25) if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-5, atol=1e-5)
    wanted = gradients(model, expected.sum())
    for name, gradient in gradients(model, found.sum()).items():
        limit = 1e-5 * float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=limit)


def test_targets_that_do_not_count_can_be_chosen() -> None:
    model, tokens, targets = language_model(), random_tokens(2, 25), random_tokens(2, 25, seed=1)
    targets[:, 4:9] = 7
    expected = direct_loss(model, tokens, targets, ignore_index=7)
    torch.testing.assert_close(model.loss(tokens, targets, ignore_index=7), expected)


def test_loss_of_int32_tokens_and_targets() -> None:
    model, tokens = language_model(), random_tokens(2, 25)
    expected = model.loss(tokens, tokens)
    torch.testing.assert_close(model.loss(tokens.int(), tokens), expected)
    torch.testing.assert_close(model.loss(tokens.int(), tokens.int()), expected)


def test_loss_of_padded_rows_counts_real_targets() -> None:
    model, tokens = language_model(), random_tokens(1, 30)
    padded = torch.cat((torch.zeros(1, 12, dtype=torch.int64), tokens), dim=1)
    mask = torch.arange(42)[None] >= 12
    targets = padded.masked_fill(~mask, -100)
    torch.testing.assert_close(model.loss(padded, targets, key_padding_mask=mask), model.loss(tokens, tokens))


def test_the_loss_of_a_half_precision_model_is_float32() -> None:
    model, tokens = language_model(dtype=torch.bfloat16), random_tokens(2, 40)
    loss = model.loss(tokens, tokens)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, direct_loss(model, tokens, tokens), rtol=1e-5, atol=0.0)


def test_the_loss_of_a_float64_model_is_float64() -> None:
    model, tokens = language_model(dtype=torch.float64), random_tokens(2, 40)
    loss = model.loss(tokens, tokens)
    assert loss.dtype == torch.float64
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


def large_vocabulary() -> tuple[ts.LanguageModel, Tensor]:
    """More logits than are ever made at once."""
    model = language_model(vocab_size=50_000, d_model=8, num_heads=1, num_layers=1)
    tokens = random_tokens(4, 360, vocabulary=50_000)
    assert tokens.numel() * 50_000 > 4 * module.LOGITS_AT_ONCE["cpu"]
    return model, tokens


@pytest.mark.parametrize("gradient", [True, False], ids=["training", "evaluation"])
def test_the_loss_never_holds_all_logits_of_a_large_vocabulary(gradient: bool) -> None:
    model, tokens = large_vocabulary()

    def step() -> None:
        with torch.set_grad_enabled(gradient):
            loss = model.loss(tokens, tokens)
        if gradient:
            loss.backward()

    weights = sum(parameter.numel() for parameter in model.parameters())
    assert peak_bytes(step) < 4 * (2 * module.LOGITS_AT_ONCE["cpu"] + 4 * weights)  # twice: log-softmax beside logits


def test_logits_are_not_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they kept in parts, whose sum would be all of them."""
    model, tokens = language_model(vocab_size=5000, d_model=8, num_heads=1, num_layers=1), random_tokens(1, 200)
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        direct_loss(model, tokens, tokens)
        assert sum(kept) > 200 * 5000
        kept.clear()
        monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 20 * 5000)
        loss = model.loss(tokens, tokens)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(kept) < 200 * 5000 / 4 + 20 * weights
    loss.backward()


# Errors


@pytest.mark.parametrize("worst", [VOCABULARY, 1000, -1, -100])
def test_a_token_outside_the_vocabulary_is_named(worst: int) -> None:
    model, tokens = language_model(), random_tokens(2, 20)
    tokens[1, 3] = worst
    for call in (model, lambda t: model.loss(t, random_tokens(2, 20)), lambda t: model.generate(t, max_new_tokens=1)):
        with pytest.raises(ValueError, match=rf"\[0, {VOCABULARY}\).* got {worst}$"):
            call(tokens)


@pytest.mark.parametrize("worst", [VOCABULARY, -1])
def test_a_target_outside_the_vocabulary_is_named(worst: int) -> None:
    model, tokens, targets = language_model(), random_tokens(2, 20), random_tokens(2, 20)
    targets[1, 3] = worst
    with pytest.raises((ValueError, IndexError), match=str(worst)):
        model.loss(tokens, targets)


@pytest.mark.parametrize("shape", [(5,), (1, 5, 1), ()])
def test_tokens_are_a_batch_of_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tokens must be \[batch, length\]"):
        language_model()(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16], ids=str)
def test_tokens_are_ints(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"int32 or int64, got {dtype}"):
        language_model()(torch.zeros(1, 5, dtype=dtype))


def test_targets_have_the_shape_of_tokens() -> None:
    with pytest.raises(ValueError, match=r"shape of tokens \[2, 20\], got \[2, 19\]"):
        language_model().loss(random_tokens(2, 20), random_tokens(2, 19))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="mean, sum or none; got 'max'"):
        language_model().loss(random_tokens(2, 20), random_tokens(2, 20), reduction="max")


def test_learned_positions_say_where_they_end() -> None:
    model = language_model("learned", max_length=20)
    model(random_tokens(1, 20))
    with pytest.raises(ValueError, match=r"learned positions end at 20 tokens, got 21"):
        model(random_tokens(1, 21))


def test_no_tokens_give_no_logits() -> None:
    assert language_model()(random_tokens(2, 0)).shape == (2, 0, VOCABULARY)


def test_what_is_no_tensor_is_refused_in_words() -> None:
    tokens = random_tokens(1, 4)
    for model in (language_model(), encoder()):
        for call in (lambda m: m("text"), lambda m: m([[1, 2]]), lambda m: m.loss("text", tokens)):
            with pytest.raises(TypeError, match="tokens must be an int tensor"):
                call(model)
        with pytest.raises(TypeError, match="targets must be an int tensor"):
            model.loss(tokens, [[1, 2, 3, 4]])
        with pytest.raises(TypeError, match=r"key_padding_mask must be a bool tensor.*list"):
            model(tokens, key_padding_mask=[[True] * 4])


def gradients_by_torch_func(model: ts.LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens,)).square().sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


def test_torch_func_is_refused_under_alibi() -> None:
    model, tokens = language_model(), random_tokens(3, 10)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (tokens,)), model(tokens))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        gradients_by_torch_func(model, tokens)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(lambda row: model(row[None])[0])(tokens)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, about its own attention
def test_torch_func_works_without_a_bias() -> None:
    model, tokens = language_model("rotary"), random_tokens(3, 10)
    model(tokens).square().sum().backward()
    for name, gradient in gradients_by_torch_func(model, tokens).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-3)
    rows = torch.func.vmap(lambda row: model(row[None])[0])(tokens)
    torch.testing.assert_close(rows, model(tokens), rtol=1e-4, atol=1e-4)
