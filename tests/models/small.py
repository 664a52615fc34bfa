"""Small models whose every part matters: weights large enough that a wrong bias, norm or position shows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import trainshort as ts
from trainshort.positions import POSITIONS

EVERY_POSITION = list(POSITIONS)
# Those that a CUDA graph can step with.
STEPPING_POSITIONS = [name for name in POSITIONS if name != "kerple"]
VOCABULARY = 61
FOX_PRO: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "silu", "gated": True, "qk_norm": True, "kv_shift": True, "output_norm": True,
    "output_gate": True,
}  # fmt: skip

Model = TypeVar("Model", bound=nn.Module)


def small_config(position: str = "alibi", **changes: Any) -> ts.ModelConfig:
    """Two layers, four heads of eight channels. Learned positions have 1024.

    Not tied: a tied head with large weights repeats the last token whatever the layers say.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 4,
        "position": position,
        "max_length": 1024 if position == "learned" else None,
        "tie_embeddings": False,
    }
    return ts.ModelConfig(**(fields | changes))


def lively(model: Model, seed: int = 0) -> Model:
    """Replace the small initial weights, with which every model says nearly the same, by ones of natural size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif "log_slopes" in name:
                parameter.add_(0.3 * noise)
            elif "gates" in name and parameter.dim() == 1:
                parameter.copy_(4.0 + noise)  # open enough that far tokens matter
            elif name.split(".")[-1] in ("a", "p"):  # of kerple, which are positive
                parameter.copy_(noise.abs() + 0.1)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embedding" in name or "token_types" in name or name.endswith("table"):
                parameter.copy_(noise)
            else:
                gain = 3.0 if name == "head.weight" else 1.0
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
    return model


def language_model(
    position: str = "alibi", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> ts.LanguageModel:
    """A lively language model in evaluation mode."""
    return lively(ts.LanguageModel(small_config(position, **changes)), seed).to(dtype).eval()


def encoder(
    position: str = "alibi", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> ts.Encoder:
    """A lively encoder in evaluation mode."""
    return lively(ts.Encoder(small_config(position, causal=False, **changes)), seed).to(dtype).eval()


def random_tokens(batch: int, length: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Rows [T_i] of different lengths -> tokens [B, T] and a mask that is True for real ones."""
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat((row.new_full((longest - len(row),), filler), row)) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    return tokens, mask


def in_pieces(model: ts.LanguageModel, tokens: Tensor, sizes: list[int], cache: Any, **first: Any) -> Tensor:
    """Logits of all tokens; `first` goes with the first piece."""
    assert sum(sizes) == tokens.shape[1]
    out = []
    with torch.no_grad():
        for part in tokens.split(sizes, dim=1):
            out.append(model(part, cache=cache, **first))
            first = {}
    return torch.cat(out, dim=1)
