"""What to train and how: one frozen object that a run folder keeps as train.json. Light: needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainshort.common.settings import Settings
from trainshort.training.recipes import RECIPES

# Fields that may differ when a run goes on: they change what is written where, never a number.
_FREE = {"free": True}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """One training run. Fields that are None follow from the others."""

    data: str = field(metadata={"help": "the folder that prepare wrote", "metavar": "FOLDER", **_FREE})
    out: str = field(metadata={"help": "the run folder to write", "metavar": "FOLDER", **_FREE})
    position: str = field(
        default="alibi",
        metadata={
            "help": "the method: alibi, fox, rotary, t5, kerple, sinusoidal, learned, none, or your own (--import)"
        },
    )
    name: str | None = field(
        default=None,
        metadata={
            "help": "what reports call it (default: the method, and what differs where several have it)",
            **_FREE,
        },
    )
    length: int = field(default=512, metadata={"help": "tokens in a training sequence", "least": 1})
    model: str = field(default="tiny", metadata={"help": "the recipe of the model's size", "choices": tuple(RECIPES)})
    num_layers: int | None = field(default=None, metadata={"help": "instead of the recipe's", "least": 1})
    d_model: int | None = field(default=None, metadata={"help": "instead of the recipe's", "least": 1})
    num_heads: int | None = field(default=None, metadata={"help": "instead of the recipe's", "least": 1})
    d_ff: int | None = field(default=None, metadata={"help": "instead of the recipe's", "least": 1})
    dropout: float | None = field(default=None, metadata={"help": "instead of the recipe's", "least": 0})
    attention_dropout: float | None = field(
        default=None, metadata={"help": "of attention's weights; by default the recipe's: 0", "least": 0}
    )
    model_options: Mapping[str, Any] = field(default_factory=dict, metadata={"hidden": True})
    position_options: Mapping[str, Any] = field(default_factory=dict, metadata={"hidden": True})
    extended_at: tuple[int, ...] = field(default=(), metadata={"hidden": True})  # steps at which it was done before
    steps: int = field(default=1000, metadata={"help": "optimizer steps", "least": 1})
    batch_tokens: int = field(default=8192, metadata={"help": "tokens an optimizer step", "least": 1})
    accumulation: int = field(
        default=1, metadata={"help": "parts that a batch is computed in: less memory, the same sum", "least": 1}
    )
    lr: float = field(default=1e-3, metadata={"help": "the highest learning rate"})
    warmup: int | None = field(
        default=None, metadata={"help": "steps in which the learning rate rises; by default 5% of them", "least": 0}
    )
    final_lr: float = field(default=0.1, metadata={"help": "where the cosine ends, as a part of lr", "least": 0})
    optimizer: str = field(
        default="adamw",
        metadata={"help": "muon: for the hidden matrices, with adamw for the rest", "choices": ("adamw", "muon")},
    )
    beta1: float = field(default=0.9, metadata={"help": "of AdamW", "least": 0})
    beta2: float = field(default=0.95, metadata={"help": "of AdamW", "least": 0})
    weight_decay: float = field(default=0.1, metadata={"help": "of matrices; norms and biases have none", "least": 0})
    clip: float = field(default=1.0, metadata={"help": "the largest gradient norm; 0: any", "least": 0})
    packing: str = field(
        default="across",
        metadata={
            "help": "documents: attention stays inside each document; across: it does not",
            "choices": ("across", "documents"),
        },
    )
    seed: int = field(default=0, metadata={"help": "of the weights, the order of the data and dropout", "least": 0})
    device: str = field(
        default="auto", metadata={"help": "auto, cpu, cuda, cuda:1, mps; auto: the GPU where there is one", **_FREE}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "of the arithmetic; auto: bfloat16 on a GPU, float32 elsewhere; weights stay float32",
            "choices": ("auto", "float32", "bfloat16"),
        },
    )
    parallel: str | None = field(
        default=None,
        metadata={
            "help": "of processes that torchrun starts: ddp: each has the whole model; fsdp: each a shard of it; by "
            "default ddp where there are several",
            "choices": ("ddp", "fsdp"),
            **_FREE,
        },
    )
    context_parallel: int = field(
        default=1,
        metadata={
            "help": "processes that share each row, a span of its tokens each: for long rows",
            "least": 1,
            **_FREE,
        },
    )
    activation_checkpointing: bool = field(
        default=False,
        metadata={"help": "keep no activations inside blocks, compute them again backward: less memory", **_FREE},
    )
    attention: str = field(
        default="auto",
        metadata={
            "help": "dense: a table of all scores, as before fused kernels, to be measured beside them; its memory "
            "grows with the square of the length",
            "choices": ("auto", "dense"),
        },
    )
    compile: bool | None = field(
        default=None, metadata={"help": "use torch.compile; by default on a GPU only", **_FREE}
    )
    log_every: int = field(default=1, metadata={"help": "steps between lines of metrics.jsonl", "least": 1})
    eval_every: int = field(
        default=0, metadata={"help": "steps between validation losses; 0: at the end only", "least": 0}
    )
    eval_tokens: int = field(default=65536, metadata={"help": "validation tokens in each; 0: none", "least": 0})
    checkpoint_every: int = field(
        default=200, metadata={"help": "steps between checkpoints; 0: at the end only", "least": 0, **_FREE}
    )
    tensorboard: bool = field(
        default=False, metadata={"help": "also write TensorBoard events (needs the package tensorboard)", **_FREE}
    )

    def __post_init__(self) -> None:
        self.check()
        for name in ("model_options", "position_options"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        object.__setattr__(self, "extended_at", tuple(self.extended_at))
        if not all(isinstance(step, int) and 0 < step < self.steps for step in self.extended_at):
            raise ValueError(f"extended_at must hold steps before the last, {self.steps}; got {self.extended_at}")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.warmup is not None and self.warmup > self.steps:
            raise ValueError(f"warmup must be at most steps ({self.steps}), got {self.warmup}")
        if self.attention == "dense" and (self.packing == "documents" or self.context_parallel > 1):
            raise ValueError(
                "attention 'dense' is for whole rows in one process: use packing 'across' and no context_parallel"
            )
        part = self.length * self.accumulation
        if self.batch_tokens % part:
            near = max(1, round(self.batch_tokens / part)) * part
            raise ValueError(
                f"batch_tokens must be a multiple of length x accumulation ({self.length} x {self.accumulation}), "
                f"got {self.batch_tokens}; the nearest is {near}"
            )
        for name in ("position", "position_options", *_ELSEWHERE, *_MODEL_FIELDS):
            if name in self.model_options:
                raise ValueError(
                    f"model_options may not set {name!r}: {_ELSEWHERE.get(name, 'give it as a field of its own')}"
                )

    @property
    def sequences(self) -> int:
        """Training sequences in an optimizer step."""
        return self.batch_tokens // self.length

    @property
    def warmup_steps(self) -> int:
        return self.steps // 20 if self.warmup is None else self.warmup

    def model_fields(self, vocab_size: int) -> dict[str, Any]:
        """The fields of the ModelConfig: the recipe's, with those that are given here instead."""
        chosen = {name: getattr(self, name) for name in _MODEL_FIELDS if getattr(self, name) is not None}
        return {
            **RECIPES[self.model](),
            **chosen,
            **self.model_options,
            "vocab_size": vocab_size,
            "position": self.position,
            "position_options": dict(self.position_options),
            "max_length": self.length if self.position == "learned" else None,
        }

    def differences(self, other: TrainConfig) -> list[str]:
        """`lr was 0.001, is 0.01 now` for each field that may not change when a run goes on."""
        return [
            f"{each.name} was {getattr(self, each.name)!r}, is {getattr(other, each.name)!r} now"
            for each in fields(TrainConfig)
            if not each.metadata.get("free") and getattr(self, each.name) != getattr(other, each.name)
        ]


_MODEL_FIELDS = ("num_layers", "d_model", "num_heads", "d_ff", "dropout", "attention_dropout")
_ELSEWHERE = {
    "vocab_size": "the data's tokenizer says it",
    "max_length": "it is the training length",
    "causal": "language models are",
}


def _plain(name: str, options: object) -> dict[str, Any]:
    """As JSON gives it back, so that a config read from a file equals the one that was written."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{name} must be a dict of names and values, got {options!r}")
    try:
        return dict(json.loads(json.dumps(dict(options))))
    except TypeError as error:
        raise ValueError(f"{name} may hold what JSON knows, no more: {error}") from error


def free_fields() -> list[str]:
    """The fields that may differ when a run goes on."""
    return [each.name for each in fields(TrainConfig) if each.metadata.get("free")]
