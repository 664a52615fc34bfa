"""Train a language model with any position method, on a folder that prepare wrote.

The run folder holds config.json, tokenizer.json and model.safetensors (trainshort.load reads them), train.json,
metrics.jsonl and state/. Ctrl-C saves and stops; `--resume` goes on exactly where the last checkpoint was, with the
settings of the run: it needs no other flag than --out. With a larger `--steps` it goes on with a run that is done;
from there on the learning rate is that of the longer run, and the run remembers where it was extended.

Under torchrun several processes share every batch, and `--parallel fsdp` the model too; with `--context-parallel C`
each row is shared by C of them. A run may go on with another number of processes, or with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trainshort.cli.settings import options_from
from trainshort.cli.stopping import ending_undisturbed, on_stop
from trainshort.training.config import TrainConfig
from trainshort.training.launch import EndedByOthersError, is_launched, rank

EXAMPLES = """
  trainshort train --data data --position alibi --length 512 --out runs/alibi-512
  trainshort train --out runs/alibi-512 --resume
  trainshort train --out runs/alibi-512 --resume --steps 2000         more steps for a run that is done
  trainshort train --data data --out runs/wide --d-model 256 --num-layers 6 --set activation=silu gated=true
  trainshort train --data data --out runs/rope --position rotary --set position.base=500000
  trainshort train --data data --out runs/fox --position fox --set position.gate_bias=5 qk_norm=true output_gate=true
  trainshort train --data data --out runs/own --import shape.py --position shape
  torchrun --nproc-per-node 8 -m trainshort train --data data --model paper-1.3b --length 1024 --parallel fsdp \\
      --batch-tokens 524288 --accumulation 4 --out runs/large
  trainshort train --data data/wikitext --model paper-wikitext103 --batch-tokens 73728 --length 3072 \\
      --accumulation 8 --steps 286000 --out runs/paper
"""


@dataclass(frozen=True, kw_only=True)
class Flags(TrainConfig):
    """The fields of a TrainConfig, and which were given: a run that goes on takes the others from its folder."""

    data: str = field(default="", metadata={"help": "the folder that prepare wrote (needed, but for --resume)"})
    set: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "other fields of the model, and position.NAME for options of the position method",
            "metavar": "NAME=VALUE",
        },
    )
    resume: bool = field(default=False, metadata={"help": "go on with the run in the folder --out"})
    given: Mapping[str, Any] = field(default_factory=dict, metadata={"hidden": True})

    def __post_init__(self) -> None:
        """Nothing is checked before it is known what the run folder says."""

    @classmethod
    def from_flags(cls, **given: Any) -> Flags:
        return cls(**given, given=given)

    def config(self) -> TrainConfig:
        known = {each.name for each in fields(TrainConfig)}
        chosen = {name: value for name, value in self.given.items() if name in known}
        model, position = options_from(self.set)
        if model:
            chosen["model_options"] = model
        if position:
            chosen["position_options"] = position
        if self.resume:
            from trainshort.training.run import RunFolder

            run = RunFolder(self.out)
            if run.has_config or not self.data:
                # train() knows where it was extended; and how processes share it is a question where there are some
                alone = {} if is_launched() else {"parallel": None, "context_parallel": 1}
                return replace(run.config(), **{"extended_at": (), **alone, **chosen})
        if not self.data:
            raise ValueError(
                "train needs --data, the folder that prepare wrote: trainshort prepare book.txt --out data"
            )
        return TrainConfig(**chosen)


def run(flags: Flags) -> None:
    config = flags.config()
    from trainshort.training.run import RunFolder
    from trainshort.training.train import train

    folder = RunFolder(config.out)
    before = folder.step if flags.resume and folder.finished else None
    began = f"stopped before the first step: the same command {'goes on' if flags.resume else 'starts again'}"
    try:
        with ending_undisturbed(), on_stop(lambda: began):
            train(config, resume=flags.resume)
    except EndedByOthersError as error:  # who failed first has said it, and the log of this rank has it all
        raise SystemExit(1) from error
    if rank() != 0:
        return
    if before == config.steps:
        print(f"{folder}: was done already, with {before:,} steps; a larger --steps goes on")
    else:
        print(f"{folder}: done")
