"""What a process needs to train a model: bytes by what they are for, from the shapes alone.

    python -m trainshort.training.memory        # the table of docs/scale.md

Weights, gradients and AdamW's two moments are float32, and the arithmetic is bfloat16 by autocast. Parameters are
counted on a model without memory. Activations are those that the backward pass of uncompiled blocks keeps, as a test
counts them with LayerNorm; compiled blocks keep fewer. Not counted: CUDA itself (about 1 GiB), NCCL's buffers, gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainshort.models import LanguageModel, ModelConfig
from trainshort.models.loss import LOGITS_AT_ONCE
from trainshort.training.recipes import RECIPES

FULL, HALF = 4, 2  # bytes of a number
GATHERED_AT_ONCE = 2  # blocks under fsdp: the one that is computed, and the next, which is on its way
SEVEN_B = {"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_ff": 11008, "activation": "silu", "gated": True}


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    state: int  # weights, gradients, optimizer
    copies: int  # weights in bfloat16, and whole ones where they are sharded
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.state + self.copies + self.activations + self.loss


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is trained. rows: those of one part of a step, on one process; context: processes that share a row."""

    length: int
    rows: int = 1
    ranks: int = 1
    context: int = 1
    parallel: str | None = None
    activation_checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Of one part of a step, on one process."""
        return -(-self.rows * self.length // self.context)


def training_memory(config: ModelConfig, setting: Setting) -> Memory:
    blocks, rest = parameters_of(config)
    everything = sum(blocks) + rest
    block = max(blocks)
    if setting.parallel == "fsdp":
        state = -(-4 * FULL * everything // setting.ranks)
        # Blocks: gathered in 16 bits, and gradients before and while they are summed. The rest: with its gradient.
        copies = GATHERED_AT_ONCE * (HALF + HALF + FULL) * block + 2 * FULL * rest
    else:
        state = 4 * FULL * everything
        copies = HALF * everything  # autocast's
    whole, kept = activations_per_token(config), FULL * config.d_model
    layers = whole + config.num_layers * kept if setting.activation_checkpointing else config.num_layers * whole
    ends = (2 * FULL + HALF) * config.d_model  # embeddings, the last norm's input, and the gradient of hidden states
    logits = min(LOGITS_AT_ONCE["cuda"], setting.tokens * config.vocab_size) * HALF
    loss = logits + (2 * FULL + HALF) * config.vocab_size * config.d_model
    return Memory(state, copies, setting.tokens * (layers + ends), loss)


def parameters_of(config: ModelConfig) -> tuple[list[int], int]:
    """Parameters of each block, and of all else."""
    with torch.device("meta"):
        model = LanguageModel(config)
    blocks = [sum(each.numel() for each in block.parameters()) for block in model.trunk.blocks]
    return blocks, sum(each.numel() for each in model.parameters()) - sum(blocks)


def activations_per_token(config: ModelConfig) -> int:
    """Bytes that the backward pass of one block keeps for each token: of a block without parts that act on heads."""
    width, heads, kv_heads = config.width, config.num_heads, config.kv_heads
    norms = 2 * (FULL + HALF) * config.d_model  # inputs of both norms, and what linear layers make of their outputs
    attention = HALF * (heads + 2 * kv_heads) * width + HALF * 2 * heads * width + FULL * heads
    hidden = 3 if config.gated else 1 if config.activation == "relu" else 2  # before and after the activation
    gates = config.gated * config.hidden * HALF  # activation(a), which b is multiplied by
    return norms + attention + hidden * config.hidden * HALF + gates


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Of keys and values in bfloat16, for a text that is read or written."""
    return 2 * HALF * config.num_layers * config.kv_heads * config.width * tokens


CASES: list[tuple[str, Setting]] = [
    ("1.3B", Setting(length=1024, rows=8)),
    ("1.3B", Setting(length=1024, rows=8, activation_checkpointing=True)),
    ("1.3B", Setting(length=1024, rows=8, ranks=8, parallel="ddp")),
    ("1.3B", Setting(length=1024, rows=8, ranks=8, parallel="fsdp")),
    ("1.3B", Setting(length=1024, rows=32, ranks=64, parallel="fsdp", activation_checkpointing=True)),
    ("7B", Setting(length=4096, rows=2, ranks=8, parallel="fsdp", activation_checkpointing=True)),
    ("7B", Setting(length=131072, ranks=8, parallel="fsdp", activation_checkpointing=True)),
    ("7B", Setting(length=131072, ranks=8, context=8, parallel="fsdp", activation_checkpointing=True)),
    ("7B", Setting(length=131072, ranks=64, context=8, parallel="fsdp", activation_checkpointing=True)),
]


def models() -> dict[str, ModelConfig]:
    fields: dict[str, dict[str, Any]] = {"1.3B": RECIPES["paper-1.3b"](), "7B": SEVEN_B}
    return {name: ModelConfig(vocab_size=32768, **values) for name, values in fields.items()}


def table() -> str:
    """For docs/scale.md, in GiB."""
    shapes = models()
    lines = [
        "| model | length | rows a process | processes | a row over | shared by | activations kept | "
        "state | copies | activations | loss | GiB in all |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, setting in CASES:
        found = training_memory(shapes[name], setting)
        parts = (found.state, found.copies, found.activations, found.loss)
        how = f"{setting.ranks} | {setting.context} | {setting.parallel or '–'}"
        kept = "inputs of blocks" if setting.activation_checkpointing else "all"
        figures = " | ".join(f"{each / 2**30:,.1f}" for each in parts)
        lines.append(
            f"| {name} | {setting.length:,} | {setting.rows} | {how} | {kept} | {figures} | "
            f"{found.total / 2**30:,.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
