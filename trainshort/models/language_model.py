"""A causal language model: tokens in, logits out, with any position method."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import Tensor, nn

from trainshort.models.bounded import BoundedCache
from trainshort.models.cache import KeyValueCache
from trainshort.models.config import ModelConfig, require_config
from trainshort.models.layers import Trunk, require_tokens
from trainshort.models.model import Model
from trainshort.models.prompts import Prompts, check_texts, stops_at
from trainshort.models.transformers_arguments import GENERATE, LANGUAGE_MODEL, instead_of
from trainshort.positions import build_position

Prompt = TypeVar("Prompt", Tensor, str, list[str])  # what generate takes is what it gives


class LanguageModel(Model):
    """A causal transformer with any position method: tokens in, logits out.

    Args:
        config: Its shape, with causal=True.

    Example:
        >>> model = ts.LanguageModel(ts.ModelConfig(d_model=64, num_layers=2, num_heads=4))
        >>> model(torch.randint(256, (1, 100))).shape
        torch.Size([1, 100, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        require_config(config)
        if not config.causal:
            raise ValueError("LanguageModel needs causal=True; for attention to both sides use Encoder")
        self.config = config
        self.position = build_position(config.position, config.position_shape, config.position_options)
        self.trunk = Trunk(config, self.position)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        initialize(self, config)
        if config.tie_embeddings:
            self.tie()

    @instead_of(LANGUAGE_MODEL)
    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """The logits of every token.

        Args:
            tokens: int [B, T].
            cache: Tokens go on after those cached, and are added to them.
            key_padding_mask: bool [B, T], True for real tokens; with a cache, padding is on the left.
            cu_seqlens: Borders of documents packed into one row.
            last_only: Of the last token alone.

        Returns:
            Logits [B, T, V], or [B, 1, V] with `last_only`.
        """
        hidden = self.trunk(tokens, cache=cache, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross entropy in nats, without ever holding all logits of a large vocabulary.

        Args:
            tokens: int [B, T].
            targets: int [B, T], the token that follows each.
            key_padding_mask: As in `forward`.
            cu_seqlens: As in `forward`.
            ignore_index: The target that does not count.
            reduction: "mean" over the targets that count, "sum", or "none".

        Returns:
            The loss, a number, or [B, T] with "none".

        Example:
            >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        """
        require_tokens("tokens", tokens)
        require_tokens("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens {list(tokens.shape)}, got {list(targets.shape)}")
        hidden = self.trunk(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head_loss(hidden, targets, ignore_index=ignore_index, reduction=reduction)

    def make_cache(self, batch_size: int, capacity: int | None = None, **options: Any) -> KeyValueCache:
        """A cache in the dtype and on the device of the model.

        Args:
            batch_size: Rows.
            capacity: The most tokens it will hold; None: it grows.
            **options: Of `KeyValueCache`, such as bounded=True.

        Returns:
            A KeyValueCache.

        Example:
            >>> cache = model.make_cache(1)
            >>> logits = model.eval()(tokens, cache=cache, last_only=True)
        """
        weight = self.trunk.embedding.weight
        cache = KeyValueCache(self.config, batch_size, capacity, dtype=weight.dtype, device=weight.device, **options)
        if self.config.qk_norm and isinstance(cache, BoundedCache):
            cache.expect_norms(*self.trunk.norm_bounds())
        return cache

    @instead_of(GENERATE)
    def generate(  # noqa: PLR0913 - a public signature
        self,
        tokens: Prompt,
        *,
        max_new_tokens: int | None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_tokens: Collection[int] | None = None,
        eos_token_id: int | Collection[int] | None = None,
        key_padding_mask: Tensor | None = None,
        use_cache: bool = True,
        bounded: bool = False,
        tolerance: float | None = None,
        on_failure: str = "rerun",
        on_token: Callable[[Tensor], None] | None = None,
        cuda_graph: bool | None = None,
    ) -> Prompt:
        """Continue tokens or texts, one token after the other.

        Args:
            tokens: int [B, T]; or where the model has a tokenizer a string, or a list of them.
            max_new_tokens: At most so many; None goes on until all rows have ended, which needs stop tokens, or
                on_token raises.
            temperature: 0 is greedy.
            top_k: Sample among so many of the most probable tokens only.
            top_p: Sample among the most probable tokens only, of which so much of the probability is.
            seed: Makes sampling repeatable.
            stop_tokens: A row ends with one of these, tokens of the vocabulary, which then fills it up; generation
                ends when all rows have ended. None: the end of text of the tokenizer for strings, and none for
                tokens. (): none.
            eos_token_id: The same under the name that transformers has for it: one token, or several.
            key_padding_mask: bool [B, T], False for left padding. Strings are padded here.
            use_cache: False computes the whole text again for each token.
            bounded: With a cache whose memory does not grow with the text (see KeyValueCache).
            tolerance: The softmax mass that a query may lose there; None: that of attention in the model's dtype.
            on_failure: Where it may have lost more: "rerun" the text, or "raise" a BoundedCacheError.
            on_token: Called with each new column [B] of tokens in order; on a GPU a few steps late.
            cuda_graph: On a GPU a step is captured and replayed, or a warning says why it can't be; False: never;
                True: raise rather than warn.

        Returns:
            What was given and what comes after it, int [B, T + new]; or a string, or a list of them, in which the
            end of text is left out.

        Example:
            >>> model.generate(tokens, max_new_tokens=20, temperature=0.8, seed=0).shape
            torch.Size([1, 40])
        """
        from trainshort.models.generate import generate, stops_of

        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "seed": seed, "use_cache": use_cache, "bounded": bounded, "tolerance": tolerance,
            "on_failure": on_failure, "on_token": on_token, "cuda_graph": cuda_graph,
        }  # fmt: skip
        stops = stops_of(stop_tokens, eos_token_id, self.config.vocab_size)
        if isinstance(tokens, Tensor):
            return generate(self, tokens, key_padding_mask=key_padding_mask, stop_tokens=stops or (), **options)
        check_texts(tokens, self.tokenizer)
        if key_padding_mask is not None:
            raise ValueError("key_padding_mask goes with tokens; texts are padded by generate: leave it out")
        texts = [tokens] if isinstance(tokens, str) else tokens
        prompts = Prompts(texts, self.tokenizer, self.config.vocab_size, self.trunk.embedding.weight.device)
        if stops is None:
            stops = stops_at(prompts.end, self.config.vocab_size)
        out = generate(self, prompts.tokens, key_padding_mask=prompts.mask, stop_tokens=stops, **options)
        found = prompts.continued(out, stops)
        return found[0] if isinstance(tokens, str) else found


def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Small normal weights, smaller where a residual sum collects them; biases zero. Gates stay as they were made."""
    for name, module in model.named_modules():
        if ".gates." in name:
            continue
        if isinstance(module, nn.Linear):
            residual = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
