"""Generation: one token after the other, with a cache or without, greedy or sampled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainshort.models.layers import check_mask, require_tokens
from trainshort.ops.threads import one_thread

if TYPE_CHECKING:
    from trainshort.models.cache import KeyValueCache
    from trainshort.models.language_model import LanguageModel

LITTLE = 2**22  # multiplications for a token, below which one thread is as fast as several
PREFILL = 2048  # tokens of a prompt that are computed at once


@torch.no_grad()
def generate(  # noqa: PLR0913 - the options of LanguageModel.generate, by which users know them
    model: LanguageModel,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_tokens: Collection[int] = (),
    key_padding_mask: Tensor | None = None,
    use_cache: bool = True,
    bounded: bool = False,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue int tokens [B, T] by up to max_new_tokens: [B, T + new].

    temperature: 0 is greedy. top_k, top_p: sample among the most probable tokens only. seed: makes sampling
    repeatable. stop_tokens: a row ends with one of these, which then fills it up; generation ends when all rows
    have ended. key_padding_mask: bool [B, T], False for left padding. bounded: with a cache whose memory does not
    grow with the text (see KeyValueCache). on_token: called with each new column [B].
    """
    _check(model, tokens, max_new_tokens, temperature, top_k, top_p)
    if key_padding_mask is not None:
        check_mask(key_padding_mask, tokens)
    generator = None
    if seed is not None:
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
    batch, length = tokens.shape
    out = torch.cat((tokens, tokens.new_zeros((batch, max_new_tokens))), dim=1)
    stops = torch.tensor(sorted(stop_tokens), dtype=tokens.dtype, device=tokens.device)
    ended = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    cache = None
    if bounded:
        if not use_cache:
            raise ValueError(
                "bounded=True is a kind of cache, and use_cache=False asks for none: leave one of them out"
            )
        cache = model.make_cache(batch, bounded=True)
    elif use_cache:
        cache = model.make_cache(batch, length + max_new_tokens)
    modes = [(module, module.training) for module in model.modules()]  # parts may be frozen, each in its own mode
    try:
        model.eval()
        little = cache is not None and _is_little(model, batch)
        for end in range(length, length + max_new_tokens):
            with one_thread() if little and end > length else nullcontext():
                logits = _next_logits(model, out[:, :end], cache, key_padding_mask)
                token = _choose(logits.float(), temperature, top_k, top_p, generator).to(tokens.dtype)
            out[:, end] = torch.where(ended, out[:, end - 1], token)
            if on_token is not None:
                on_token(out[:, end])
            if len(stop_tokens):
                ended = ended | torch.isin(out[:, end], stops)
                if bool(ended.all()):
                    return out[:, : end + 1]
    finally:
        for module, training in modes:
            module.training = training
    return out


def _check(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    require_tokens("tokens", tokens)
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.shape[0] == 0:
        raise ValueError(f"tokens must be [batch, length] with at least one token, got shape {list(tokens.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (0 is greedy), got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1] or be None, got {top_p}")
    limit = model.position.max_length
    if limit is not None and tokens.shape[1] + max_new_tokens > limit + 1:
        raise ValueError(
            f"{model.config.position} positions end at {limit} tokens: a prompt of {tokens.shape[1]} leaves room for "
            f"{max(0, limit + 1 - tokens.shape[1])} new tokens, got max_new_tokens={max_new_tokens}"
        )


def _is_little(model: LanguageModel, batch: int) -> bool:
    """Whether one token is so little work on a CPU that threads would only wait for one another."""
    weights = sum(
        weight.numel() for module in model.modules() if isinstance(module, nn.Linear) for weight in [module.weight]
    )
    return model.head.weight.device.type == "cpu" and batch * weights <= LITTLE


def _next_logits(model: LanguageModel, tokens: Tensor, cache: KeyValueCache | None, mask: Tensor | None) -> Tensor:
    """Logits of the token after the last, [B, V]."""
    if cache is None:
        if mask is not None:
            new = mask.new_ones((mask.shape[0], tokens.shape[1] - mask.shape[1]))
            mask = torch.cat((mask, new), dim=1)
        return model(tokens, key_padding_mask=mask, last_only=True)[:, -1]
    if cache.length == 0 and mask is not None:
        cache.pad_left(mask)
    logits = None
    for part in tokens[:, cache.length :].split(PREFILL, dim=1):
        logits = model(part, cache=cache, last_only=True)
    assert logits is not None
    return logits[:, -1]


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)  # probability of all that rank higher
        logits = logits.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
