"""Pickled weights to safetensors, so that the model can be loaded; or a model of ours to a BLOOM folder.

Old public models come as pytorch_model.bin, a pickle, which can run code when it is read. This command reads it in a
process of its own that allows tensors and nothing else, and writes a new folder with the same tensors under the same
names. Code that came with the model is not copied.

`--to bloom` takes a run, or any other model, and writes it as a BLOOM folder, for transformers.
Its shape must be BLOOM's, as `trainshort train --model bloom-560m` has it, with sizes of your own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EXAMPLES = """
  trainshort convert DNABERT-2-117M --out dnabert-2
  trainshort convert falcon-rw-1b --out falcon && trainshort generate falcon --prompt "Once"
  trainshort train --data data --model bloom-560m --num-layers 4 --d-model 256 --num-heads 4 --out runs/mine && \\
    trainshort convert runs/mine --out mine-bloom --to bloom
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to convert, and where to."""

    folder: str = field(
        metadata={
            "help": "with config.json and pytorch_model.bin, or several and their index; with --to bloom any model",
            "positional": True,
        }
    )
    out: str = field(metadata={"help": "the folder to write, which must not be there yet, or be empty"})
    to: Literal["safetensors", "bloom"] = field(default="safetensors", metadata={"help": "what to write"})


def run(flags: Flags) -> None:
    from trainshort.common.progress import waiting

    if flags.to == "bloom":
        from trainshort.models import load, save

        with waiting("converting"):
            save(load(flags.folder), flags.out, format="bloom")
        print(f"{flags.out} holds the model, for transformers: BloomForCausalLM.from_pretrained({flags.out!r})")
        return
    from trainshort.models.checkpoints.convert import convert

    with waiting("converting"):
        done = convert(flags.folder, flags.out)
    for file in done.files:
        shared = f", {file.copied} of them stored a second time" if file.copied else ""
        print(f"{file.source} -> {file.target}: {len(file.names):,} tensors, {file.bytes / 1e6:,.1f} MB{shared}")
    print(f"copied: {', '.join(done.kept) or 'nothing'}")
    if done.left_out:
        print(f"left out: {', '.join(done.left_out)}")
    print(f"{flags.out} holds the model")
