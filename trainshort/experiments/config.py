"""What to compare: position methods x training lengths x seeds, all else equal. Light: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshort.common.checks import is_int
from trainshort.common.settings import Settings
from trainshort.evaluation.config import EvaluateConfig
from trainshort.experiments.contenders import contender
from trainshort.training.config import TrainConfig
from trainshort.training.recipes import RECIPES as SIZES


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """One comparison. Nothing differs between methods but, where `lrs` says so, the learning rate."""

    data: str | None = field(
        default=None,
        metadata={
            "help": "the folder that prepare wrote (default: the Python library's source, prepared into OUT/data)",
            "metavar": "FOLDER",
        },
    )
    out: str = field(
        default="runs/compare", metadata={"help": "the folder for all runs and comparison.json", "metavar": "FOLDER"}
    )
    positions: tuple[str, ...] = field(
        default=("alibi", "rotary", "t5", "sinusoidal"),
        metadata={
            "help": "methods: alibi, fox, rotary, t5, kerple, sinusoidal, learned, none, or your own (--import); "
            "with options as alibi:biased_heads=6",
            "metavar": "NAME",
        },
    )
    length: tuple[int, ...] = field(default=(128,), metadata={"help": "lengths to train at, one or more"})
    seeds: tuple[int, ...] = field(default=(0,), metadata={"help": "each method is trained once with each seed"})
    multiples: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16), metadata={"help": "lengths to test at, as multiples of the training length"}
    )
    test_lengths: tuple[int, ...] = field(
        default=(),
        metadata={"help": "lengths to test at, instead of multiples; shorter ones than trained are left out"},
    )
    mode: Literal["nonoverlapping", "sliding"] = field(
        default="nonoverlapping", metadata={"help": "windows of the test: see trainshort evaluate --help"}
    )
    stride: int | None = field(default=None, metadata={"help": "of sliding windows (default: half the length)"})
    test_tokens: int | None = field(
        default=131072, metadata={"help": "validation tokens to score at most; none: all there are", "least": 1}
    )
    model: str = field(default="tiny", metadata={"help": "the size of the models", "choices": tuple(SIZES)})
    num_layers: int | None = field(default=None, metadata={"help": "instead of that size's", "least": 1})
    d_model: int | None = field(default=None, metadata={"help": "instead of that size's", "least": 1})
    num_heads: int | None = field(default=None, metadata={"help": "instead of that size's", "least": 1})
    steps: int = field(default=1000, metadata={"help": "optimizer steps of each run", "least": 1})
    batch_tokens: int = field(default=8192, metadata={"help": "tokens an optimizer step", "least": 1})
    accumulation: int = field(default=1, metadata={"help": "parts that a batch is computed in", "least": 1})
    lr: float = field(default=1e-3, metadata={"help": "the highest learning rate"})
    lrs: tuple[str, ...] = field(
        default=(), metadata={"help": "learning rates of single methods, such as rotary=0.002", "metavar": "NAME=X"}
    )
    optimizer: str = field(
        default="adamw",
        metadata={"help": "muon: for the hidden matrices, with adamw for the rest", "choices": ("adamw", "muon")},
    )
    packing: str = field(
        default="across",
        metadata={"help": "documents: attention stays inside each document", "choices": ("across", "documents")},
    )
    jobs: int | None = field(
        default=None,
        metadata={
            "help": "runs to train at once, each in its own process; by default one a GPU, and one where there is "
            "none or one",
            "least": 1,
        },
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda; auto: the GPU where there is one"})
    dtype: str = field(
        default="auto",
        metadata={"help": "of the training; auto: bfloat16 on a GPU", "choices": ("auto", "float32", "bfloat16")},
    )
    checkpoint_every: int = field(default=200, metadata={"help": "steps between checkpoints of a run", "least": 0})

    def __post_init__(self) -> None:
        for name in ("length", "seeds", "multiples", "test_lengths"):
            values = tuple(dict.fromkeys(getattr(self, name)))
            least = 0 if name == "seeds" else 1
            if any(not is_int(value) or value < least for value in values):
                raise ValueError(f"{name} must be whole numbers of at least {least}; got {list(values)}")
            object.__setattr__(self, name, values)
        self.check()
        object.__setattr__(self, "positions", tuple(dict.fromkeys(self.positions)))
        for name in ("positions", "length", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        if not self.multiples and not self.test_lengths:
            raise ValueError("test_lengths or multiples must name at least one length to test at")
        rates = self.rates
        for name in rates:
            if name not in self.positions:
                raise ValueError(f"lrs names {name!r}, which is not among the positions: {', '.join(self.positions)}")
        for length in self.length:
            self.lengths_for(length)
            self.evaluation(length)  # these refuse what evaluation and training would refuse later
            for position in self.positions:
                self.training("data", position, length, self.seeds[0])

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates of methods that have their own."""
        found = {}
        for entry in self.lrs:
            name, sign, value = entry.rpartition("=")  # the name may hold options
            try:
                found[name] = float(value)
            except ValueError:
                sign = ""
            if not sign:
                raise ValueError(f"lrs must look like rotary=0.002, got {entry!r}")
        return found

    def lengths_for(self, trained: int) -> tuple[int, ...]:
        """Where a model trained at this length is tested."""
        lengths = [each for each in self.test_lengths if each >= trained] or [
            trained * each for each in self.multiples
        ]
        if self.test_lengths and lengths[0] not in self.test_lengths:
            raise ValueError(f"test_lengths must have one of at least the training length {trained}")
        return tuple(sorted(set(lengths)))

    def name_of(self, position: str, length: int, seed: int) -> str:
        return f"{contender(position).name}-{length}-seed{seed}"

    def runs(self) -> list[tuple[str, int, int]]:
        """Position, training length and seed of every run, in the order they are made."""
        return [(p, length, seed) for seed in self.seeds for length in self.length for p in self.positions]

    def training(self, data: str, position: str, length: int, seed: int) -> TrainConfig:
        """position: as it stands among the positions, with its options."""
        chosen = contender(position)
        return TrainConfig(
            data=data,
            out=f"{self.out}/{self.name_of(position, length, seed)}",
            position=chosen.position,
            position_options=chosen.options,
            name=chosen.name if chosen.options else None,
            length=length,
            model=self.model,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            accumulation=self.accumulation,
            lr=self.rates.get(position, self.lr),
            optimizer=self.optimizer,
            packing=self.packing,
            seed=seed,
            device=self.device,
            dtype=self.dtype,
            checkpoint_every=self.checkpoint_every,
            eval_tokens=0,  # the test comes after
        )

    def evaluation(self, trained: int) -> EvaluateConfig:
        return EvaluateConfig(
            lengths=self.lengths_for(trained),
            mode=self.mode,
            stride=self.stride,
            tokens=self.test_tokens,
            dtype="float32",  # of the weights, which training keeps so: a test in another is another test
            device=None if self.device == "auto" else self.device,
        )
