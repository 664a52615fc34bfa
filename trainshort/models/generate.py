"""Generation: one token after the other, with a cache or without, greedy or sampled.

The prompt is read in large pieces; then come steps of one token, each a call of the model, or on a GPU the replay of
a CUDA graph (stepping.py). Both give columns of tokens, and one loop hands them on.
"""

from __future__ import annotations

import numbers
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainshort.models.cache import refuse_bounded_options
from trainshort.models.layers import check_mask, require_tokens
from trainshort.models.sampling import Sampling
from trainshort.models.stepping import GraphedSteps, Step, Text, warn_eager, why_not_graphed
from trainshort.ops.threads import one_thread

if TYPE_CHECKING:
    from trainshort.models.cache import KeyValueCache
    from trainshort.models.language_model import LanguageModel

LITTLE = 2**22  # multiplications for a token, below which one thread is as fast as several
PREFILL = 2048  # tokens of a prompt that are computed at once on a CPU
PREFILL_ON_GPU = 65536  # the same on a GPU, of all rows together, if they fit
FEWEST = 256  # of a row, however little memory is free
ROOM = 4096  # new tokens that there is room for from the start; for more, cache and text grow by doubling


@torch.no_grad()
def generate(  # noqa: PLR0913 - the options of LanguageModel.generate, by which users know them
    model: LanguageModel,
    tokens: Tensor,
    *,
    max_new_tokens: int | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_tokens: Collection[int] = (),
    key_padding_mask: Tensor | None = None,
    use_cache: bool = True,
    bounded: bool = False,
    tolerance: float | None = None,
    on_failure: str = "rerun",
    on_token: Callable[[Tensor], None] | None = None,
    cuda_graph: bool | None = None,
) -> Tensor:
    """Continue int tokens [B, T]: [B, T + new]. The options are those of LanguageModel.generate."""
    _check(model, tokens, max_new_tokens, temperature, top_k, top_p)
    if not (seed is None or (_is_int(seed) and -(2**63) <= seed < 2**64)):
        raise ValueError(f"seed must be an int of 64 bits, or None; got {seed!r}")
    _check_cache(use_cache, bounded, tolerance, on_failure)
    if key_padding_mask is not None:
        check_mask(key_padding_mask, tokens)
        _check_padding(key_padding_mask)
    sampling = Sampling(tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop_tokens=stop_tokens)
    count = _most(model, tokens.shape[1], max_new_tokens, bool(stop_tokens) or on_token is not None)
    text = Text(tokens, ROOM if count is None else min(count, ROOM))
    if count == 0:
        return text.tokens
    kind: dict[str, Any] = {"bounded": True, "tolerance": tolerance, "on_failure": on_failure} if bounded else {}
    cache = model.make_cache(tokens.shape[0], **kind) if use_cache else None
    if cache is not None:
        cache.reserve(text.length + text.room)
        if key_padding_mask is not None:
            cache.pad_left(key_padding_mask)
    reason = "use_cache=False" if cache is None else why_not_graphed(model, cache)
    if reason is not None and cuda_graph:
        raise RuntimeError(f"generate cannot use CUDA graphs: {reason}; leave cuda_graph out and it runs without")
    if reason is not None and cuda_graph is None and use_cache and tokens.is_cuda:
        warn_eager(reason)
    steps = _eager_steps(model, text, cache, sampling, key_padding_mask)
    if reason is None and cuda_graph is not False and count != 1:
        assert cache is not None
        steps = _graphed_steps(model, text, cache, sampling, count, cuda_graph is True)
    given = 0
    with _as_written(model), closing(steps):
        for column, ended in islice(steps, count):
            given += 1
            if on_token is not None:
                on_token(column.clone())  # its own: the text goes on from the column itself
            if ended:
                break
    return text.tokens[:, : tokens.shape[1] + given]


Steps = Generator[tuple[Tensor, bool], None, None]  # columns [B], and whether all rows have ended with it


def _eager_steps(
    model: LanguageModel, text: Text, cache: KeyValueCache | None, sampling: Sampling, mask: Tensor | None
) -> Steps:
    """One call of the model for each column; the first reads the prompt."""
    little = cache is not None and _is_little(model, len(text.tokens))
    reading = True
    while True:
        with one_thread() if little and not reading else nullcontext():
            logits = _next_logits(model, text.tokens, cache, mask)
            token = sampling.next(logits, text.tokens[:, -1])
        reading = False
        yield text.append(token), sampling.stops is not None and bool(sampling.ended.all())


def _graphed_steps(
    model: LanguageModel, text: Text, cache: KeyValueCache, sampling: Sampling, count: int | None, required: bool
) -> Steps:
    """The first column as without a graph, which reads the prompt; then replays."""
    yield next(_eager_steps(model, text, cache, sampling, None))
    cache.begin_steps()
    step = Step(model, cache, sampling, text.tokens[:, -1])
    yield from GraphedSteps(step, text, required).columns(None if count is None else count - 1)


class _Shared:
    """Lets several threads be in one context at once: the first of them enters it, and the last one leaves it."""

    def __init__(self) -> None:
        self.threads, self.lock, self.entered = 0, threading.Lock(), ExitStack()

    @contextmanager
    def inside(self, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        with self.lock:
            if self.threads == 0:
                self.entered.enter_context(make())
            self.threads += 1
        try:
            yield
        finally:
            with self.lock:
                self.threads -= 1
                if self.threads == 0:
                    self.entered.close()


_eager = _Shared()
_evaluations: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and without compiled code, which would be compiled anew for many lengths."""
    compiled = "torch._dynamo" in sys.modules and not torch.compiler.is_compiling()
    eager = _eager.inside(lambda: torch.compiler.set_stance("force_eager")) if compiled else nullcontext()
    with _evaluations.setdefault(model, _Shared()).inside(lambda: _evaluating(model)), eager:
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode. Every part gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    require_tokens("tokens", tokens)
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.shape[0] == 0:
        raise ValueError(f"tokens must be [batch, length] with at least one token, got shape {list(tokens.shape)}")
    if not (max_new_tokens is None or _is_int(max_new_tokens)):
        raise TypeError(f"max_new_tokens must be an int, or None for no end; got {max_new_tokens!r}")
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, or None for no end; got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (0 is greedy), got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1] or be None, got {top_p}")
    limit = model.position.max_length
    if limit is not None and tokens.shape[1] + (max_new_tokens or 0) > limit + 1:
        raise ValueError(
            f"{model.config.position} positions end at {limit} tokens: a prompt of {tokens.shape[1]} leaves room for "
            f"{max(0, limit + 1 - tokens.shape[1])} new tokens, got max_new_tokens={max_new_tokens}"
        )


def _is_int(value: object) -> bool:
    """Whether a value is a whole number, of Python or of NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def stops_of(
    stop_tokens: Collection[int] | None, eos_token_id: int | Collection[int] | None, vocab_size: int
) -> Collection[int] | None:
    """The tokens that end a row, by whichever name they were given; None where they were not."""
    if stop_tokens is not None and eos_token_id is not None:
        raise ValueError("stop_tokens and eos_token_id say the same thing: pass one of them")
    name, given = ("stop_tokens", stop_tokens) if eos_token_id is None else ("eos_token_id", eos_token_id)
    if given is None:
        return None
    ids: Any = given.tolist() if isinstance(given, Tensor) else given
    if name == "eos_token_id" and _is_int(ids):
        ids = (ids,)
    if not isinstance(ids, Collection) or not all(map(_is_int, ids)):
        one = "a token id, or " if name == "eos_token_id" else ""
        raise TypeError(f"{name} must be {one}several token ids, such as (0,) or a list; got {given!r}")
    for each in ids:
        if not 0 <= each < vocab_size:
            raise ValueError(f"{name} must lie in [0, {vocab_size}), the vocabulary; got {each}")
    return [int(each) for each in ids]


def _check_padding(mask: Tensor) -> None:
    """Of a prompt, on every device: it waits for a GPU once, which is little beside reading the prompt."""
    good: list[bool] = (mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(-1)).tolist()
    if not all(good):
        raise ValueError(
            "generate goes on from the last token of each row, so rows are padded on the left: key_padding_mask must "
            f"end in True and be False before the first token alone, and row {good.index(False)} is not so. Move its "
            "padding to the left, or leave out a row without a token"
        )


def _check_cache(use_cache: bool, bounded: bool, tolerance: float | None, on_failure: str) -> None:
    if bounded and not use_cache:
        raise ValueError("bounded=True is a kind of cache, and use_cache=False asks for none: leave one of them out")
    if not bounded:
        refuse_bounded_options(tolerance, on_failure)


def _most(model: LanguageModel, length: int, max_new_tokens: int | None, may_end: bool) -> int | None:
    """How many columns may come; None: any number. The last token needs no position: it is not read."""
    limit = model.position.max_length
    if max_new_tokens is None and limit is None and not may_end:
        raise ValueError("max_new_tokens=None needs stop_tokens, eos_token_id or on_token: nothing else would end it")
    return limit + 1 - length if max_new_tokens is None and limit is not None else max_new_tokens


def _is_little(model: LanguageModel, batch: int) -> bool:
    """Whether one token is so little work on a CPU that threads would only wait for one another."""
    weights = sum(
        weight.numel() for module in model.modules() if isinstance(module, nn.Linear) for weight in [module.weight]
    )
    return model.trunk.embedding.weight.device.type == "cpu" and batch * weights <= LITTLE


def _next_logits(model: LanguageModel, tokens: Tensor, cache: KeyValueCache | None, mask: Tensor | None) -> Tensor:
    """Logits of the token after the last, [B, V]."""
    if cache is None:
        if mask is not None:
            new = mask.new_ones((mask.shape[0], tokens.shape[1] - mask.shape[1]))
            mask = torch.cat((mask, new), dim=1)
        return model(tokens, key_padding_mask=mask, last_only=True)[:, -1]
    new = tokens[:, cache.length :]
    logits = None
    for part in [new] if new.shape[1] == 1 else new.split(piece_of(model, len(tokens)), dim=1):
        logits = model(part, cache=cache, last_only=True)
    assert logits is not None
    return logits[:, -1]


def piece_of(model: LanguageModel, batch: int) -> int:
    """How many tokens of a row are computed at once when a prompt is read.

    On a GPU PREFILL_ON_GPU of all rows together, or as many as half of the free memory holds: a layer keeps about
    four vectors of d_model, two of queries, keys and values, and three of the feed-forward layer for each.
    """
    weight, config = model.trunk.embedding.weight, model.config
    if not weight.is_cuda:
        return PREFILL
    channels = (config.num_heads + 2 * config.kv_heads) * config.width
    hidden = config.hidden * (2 if config.gated else 1)
    size = weight.element_size() * (4 * config.d_model + 2 * channels + 3 * hidden)
    unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    free = torch.cuda.mem_get_info(weight.device)[0] + unused
    return max(FEWEST, min(PREFILL_ON_GPU, free // 2 // size) // batch)
